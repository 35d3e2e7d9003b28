"""Names of prompt prefixes, block by block, by which caches and routers know them."""

import hashlib
from array import array
from collections.abc import Sequence


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: its tokens and all before them (`parent` names those)."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=16).digest()


def chain_root(scope: str) -> bytes:
    """Return what the name of a first block is made of, beside its tokens; "" = the model itself, shared by all."""
    return hashlib.blake2b(scope.encode(), digest_size=16).digest() if scope else b""


def block_chain(token_ids: Sequence[int], block_size: int, *, of: str = "") -> list[bytes]:
    """Names of the blocks that the tokens fill, in order; each names all tokens up to its end.

    The same tokens have other names in another scope (`Request.cache_scope`).
    """
    chain: list[bytes] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        chain.append(hash_block(chain[-1] if chain else chain_root(of), token_ids[end - block_size : end]))
    return chain
