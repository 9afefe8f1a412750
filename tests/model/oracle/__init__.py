"""The naive cache that the real one is compared with."""

from .cache import Oracle as Oracle
from .entries import Refused as Refused
