"""Native Sparse Attention: what a user chooses (`verification`, without JAX), and the kind that a model's layers have.

The parameters, compression and gates of the kind are in `nsa`; `routing` picks the blocks that a query reads and
`groups` reads them for several queries at once; `compression_update` compresses blocks as their last token
arrives. `family` reads and writes models that have it.
"""
