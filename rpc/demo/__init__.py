"""`radixpool demo`: the whole system on one machine, on real conversations, with figures at the end.

`conversations` reads chats, `prompts` turns them into token ids that only ever grow, `supervisor` runs the processes,
`replay` sends the requests, `report` shows what came of it.
"""
