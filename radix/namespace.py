"""Namespaces: everything besides the tokens that changes a block's KV. One namespace is one tree.

Fields are compared field by field and encoded with length prefixes, so no value of one field can stand for a value
of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["DEFAULT_NAMESPACE", "Namespace"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Name the tree a prefix lives in. Equal namespaces share blocks, others never do.

    Attributes:
        model: model name.
        revision: revision of the model's weights.
        adapter: adapter (LoRA) name, empty for the base model.
        adapter_generation: raise it when an adapter's weights are replaced under the same name.
        tenant: whose data it is: the unit of quotas and isolation.
        cache_salt: secret of a group of requests that may share with each other only.

    """

    model: str = ""
    revision: str = ""
    adapter: str = ""
    adapter_generation: int = 0
    tenant: str = ""
    cache_salt: str = ""
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        for name in ("model", "revision", "adapter", "tenant", "cache_salt"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"namespace.{name} must be str, not {type(getattr(self, name)).__name__}")
        if not isinstance(self.adapter_generation, int) or self.adapter_generation < 0:
            raise ValueError(f"namespace.adapter_generation must be an integer >= 0, not {self.adapter_generation!r}")

        values = (getattr(self, spec.name) for spec in fields(self) if spec.compare)
        object.__setattr__(self, "_hash", hash(tuple(values)))  # every request looks its namespace up

    def __hash__(self) -> int:
        return self._hash

    def encode(self) -> bytes:
        """Return an injective encoding: every field length-prefixed, in order.

        >>> Namespace(adapter="x").encode() == Namespace(cache_salt="x").encode()
        False
        """
        parts = (str(getattr(self, spec.name)).encode() for spec in fields(self) if spec.compare)
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


DEFAULT_NAMESPACE = Namespace()
