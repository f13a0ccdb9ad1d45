"""One budget of memory for the engines of one machine, kept by a process of its own: the broker.

`vattn pool serve NAME --budget SIZE` runs it. A `PagePool.connect(NAME)` in any other process is a *borrower*: its
pages count in the broker's budget, not in one of its own. Nothing here imports torch, so the broker starts at once and
stays small.

**Who owns what.** The broker owns the books: of every borrower it knows the *lease*, which is the most memory that the
borrower may have now. The memory itself is the borrower's: on a CPU one memfd, of which the broker gets a descriptor
when the borrower joins; on CUDA what the driver gave to the process; with vLLM what the workers have, for which the
process of their scheduler borrows. So one page is never in two processes because of a mistake in the books, a page that
changes hands is given back to the system and comes from it anew, which zeroes it, and nobody gets another's descriptor.
The broker's own descriptors serve to count: what the file holds, says the kernel. Without one, a borrower is believed.
Borrowers that share prefixes are the exception: they get read-only descriptors of each other (`directory.py`), and what
one has published is the broker's once its process has ended (`kept.py`).

**A lease is a level**, in bytes, not a number of grants and returns, and every message states it whole. A message of
the broker has a number, higher than all before; the borrower takes the highest and drops others. Only the broker raises
a level, and only the borrower lowers it. The broker believes a lower level if the borrower has seen its last message:
so the level in the broker's books is never below the borrower's own, whatever is lost, doubled or late. What is lost is
said again with the next message, which comes within a second.

**What a borrower does.** A thread keeps the connection (`borrower.py`). It asks for memory ahead of need, in chunks.
The caller's thread waits only when memory is really short: until the lease has grown, the broker says that there is
none (`short`), or a time-out.

**What the broker does** when leases cannot grow: it asks back (`give`), in this order: leases that nobody uses; parked
pages; cached prefixes, by last use over all borrowers; and, for a borrower that is below its guarantee while a call of
its engine waits, what others have above theirs, which their engines reach by preemption. A borrower answers between two
steps of its engine. One that does not answer in time, or has nothing to give, is left alone for a moment.

What happens when

- a borrower ends, or is killed at any instant: the system frees its memory. The broker learns of the end by a pidfd,
  which is signalled after that, closes its descriptor, and lends the memory to others.
- a connection ends, but not the process: the lease stays in the books until the process ends or joins again.
- a borrower hangs: what it has stays its own; who waits for it is told that memory is short.
- the disk is slow or full: leases that have to be noted wait for it; if it refuses, they are told without a note.
- the broker ends: a file beside its socket says who has which lease, so that the next one lends nothing that somebody
  has. Borrowers go on with their leases; a step that needs more raises `OutOfPages`, which says so; they
  try to join again, with the leases that they have.
- a borrower lies about its lease: it is charged for what its file holds, if that is more.

The messages are in `wire.py`, the decisions in `books.py` and `lease.py`, which do no input or output, the process in
`server.py`, and the file in `notes.py`.
"""
