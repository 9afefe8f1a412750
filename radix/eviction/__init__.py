"""Eviction policies, chosen by name with parameters: ``"lru"``, ``"s3fifo:small=0.1"``.

Every module of this package is loaded on first use; a class derived from `EvictionPolicy` that sets `name` is found.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import iter_modules

from radixpool.radix.eviction.base import DEFAULT_PRIORITY, EvictionPolicy, Run

__all__ = ["DEFAULT_PRIORITY", "EvictionPolicy", "Run", "available_policies", "make_policy", "parse_policy"]


def available_policies() -> dict[str, type[EvictionPolicy]]:
    """Return all policies by name, sorted."""
    found: dict[str, type[EvictionPolicy]] = {}
    for module in iter_modules(__path__):
        for cls in vars(import_module(f"{__name__}.{module.name}")).values():
            if inspect.isclass(cls) and issubclass(cls, EvictionPolicy) and not inspect.isabstract(cls):
                found[cls.name] = cls
    return dict(sorted(found.items()))


def parse_policy(spec: str) -> tuple[type[EvictionPolicy], dict[str, int | float]]:
    """Read ``name[:key=value[,key=value…]]``; a value takes the type of the parameter's default.

    >>> parse_policy("lru")
    (<class 'radixpool.radix.eviction.lru.LRU'>, {})

    Raises:
        ValueError: unknown policy or parameter, or a value that does not fit; the message lists what there is.

    """
    name, _, rest = spec.partition(":")
    policies = available_policies()
    if name not in policies:
        raise ValueError(f"policy: unknown eviction policy {name!r}; there are: {', '.join(policies)}")
    known = {
        parameter.name: parameter.default
        for parameter in inspect.signature(policies[name]).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    params: dict[str, int | float] = {}
    for item in filter(None, rest.split(",")):
        key, _, text = item.partition("=")
        if key not in known:
            raise ValueError(f"policy: {name} has no parameter {key!r}; it has: {', '.join(known) or 'none'}")
        params[key] = _convert(name, key, text, known[key])
    return policies[name], params


def make_policy(spec: str, capacity: int) -> EvictionPolicy:
    """Make the policy that `spec` names for a pool of `capacity` blocks."""
    cls, params = parse_policy(spec)
    return cls(capacity, **params)


def _convert(policy: str, key: str, text: str, default: int | float) -> int | float:
    try:
        return type(default)(text)
    except ValueError:
        raise ValueError(f"policy: {policy}:{key} must be {type(default).__name__}, not {text!r}") from None
