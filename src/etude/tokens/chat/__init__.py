"""Conversations that clients tell, as tokens; answers as what clients are served.

    request --openai_messages--> messages --framing--> tokens -> sampler -> tokens --reader--> parts

What a chat API sends is read into `messages` (whatever the API), laid out by `framing` with the pieces of the
one renderer, and the sampled answer is read by `reader` while it is sampled. Knows neither HTTP nor samplers.
"""
