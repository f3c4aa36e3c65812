"""The logs of one site, as data structures of its router.

An inbox holds the rows of one operator and the routes of its keys. A dispatch cursor is the position up to
which an instance has been sent an inbox; retention decides which entries may be trimmed. An output log holds
the published rows of a stream. A site outbox holds the frames for one inbox of another site. The producer
table stores the last accepted frame of each producer.

core.router and core.migration call these modules. The modules call neither of them.
"""
