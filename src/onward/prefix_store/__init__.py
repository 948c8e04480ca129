"""Prefixes on disk: the bytes of a prefix cache in a folder, which several processes share without a server.

    store = PrefixStore(folder, key, max_bytes=10 * 2**30)
    store.put(root, ids, [Part(block=0, kind=0, buffers=[view]), …])   # queued: a thread writes it
    blocks = store.find(root, ids)                                     # in memory
    right = store.read([(blocks[0][0], [writable]), …])                # how many of these are read and verified

A path is a sequence of token ids after a root; every block of it has parts, one for each kind of cache that was stored.
The last block may have fewer ids. The store knows neither models nor memory: a part is bytes. See
`onward.prefix_store.segment` for the files.
"""

from onward.prefix_store.index import StoredBlock, StoredPart
from onward.prefix_store.segment import Part
from onward.prefix_store.store import PrefixStore, StoreStats

__all__ = ["Part", "PrefixStore", "StoreStats", "StoredBlock", "StoredPart"]
