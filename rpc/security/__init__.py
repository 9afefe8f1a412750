"""Who may call, as whom, and over what: identities, the authorisation interceptor, transport credentials.

Deny by default: a method that is not in `policy.METHOD_ROLES` cannot be called by anybody. A frontend's tenant comes
from its credential; what a request says about the tenant can only be refused, never believed. SECURITY.md has the
threat model. Clients import `client` only, so nothing is imported here.
"""
