"""Files and bytes of the other nodes on their way to the head's disk, over the control channel.

A node:                                                     The head:

    transfers = Transfers(link)                             places = {"shard": place}   # Offer -> Path, or raises Refused
    transfers.send(path, {"kind": "shard", ...}, content)   with Receiving(server, places):
    transfers.send(buffer, {"kind": "snapshot", ...})           for event in server.receive(...):
    select([..., transfers.fileno()], ...)                          match event:
    for outcome in transfers.outcomes(): ...                            case Arrived(label=..., path=..., error=...): ...

`label["kind"]` says which rule at the head decides where it goes; the rest of the label is for that rule. A file is at the
head under its name only when it is there whole, synced, with the size and the XXH3-128 digest that the sender gave; until
then it is `.NAME.part` beside it, which goes away with whatever goes wrong. Both sides are told of every end: the sender by
an Outcome, the head's front by an Arrived among its events, which comes before any message that the sender sends after its Outcome.

    node → head   offer: id, size, digest, label
    head → node   more: so many pieces may come                              no room, no such place: done, with the reason
    node → head   pieces, each of at most PIECE_BYTES
    head → node   more: 1, for each piece that is written
    node → head   sent                                                       withdraw: it cannot be read after all
    head → node   done, with the reason if it is not there                   at any time

So at most WINDOW pieces of a file are on their way, and what else the channel carries (beats, an abort, a verdict) waits for
4 MiB at the most. The head takes AT_ONCE files at the same time; further offers wait. A node sends one after the other.
Nothing here waits in the thread of a front: reading, digesting, writing and syncing have threads of their own.
"""
