# SPDX-License-Identifier: Apache-2.0
"""Every bound of the control plane, with the reason beside it.

The kernel's own bounds stand in `native/kernel/src/limits.rs`.
"""

MIB = 1 << 20

# One read from a file or a socket: large enough that the cost of a call vanishes, small enough for the cache.
READ_BYTES = MIB

# Capture hands bytes on when so many are gathered, or as soon as no more wait.
CAPTURE_CHUNK_BYTES = 4 * MIB

# The log notes how far it is durable so often, at the next sync; recovery reads what follows event by event.
POSITION_NOTED_SECONDS = 1.0
POSITION_NOTED_BYTES = 64 * MIB

# Under load the log is synced as soon as so many bytes wait. What is on the disk then leaves the page cache,
# so that its memory is used again: on a virtual machine, memory that is new to it costs more than the disk.
LOG_SYNC_BYTES_MAX = 32 * MIB

# An Arrow batch closes at either bound, at the next end of a transaction.
BATCH_ROWS_MAX = 65_536
# The same, in bytes of row images: memory that is new to the process costs more than decoding into it, and a
# short range has no time to use it again.
BATCH_BYTES_MAX = 8 * MIB

# An Arrow batch for Spark: its JVM goes over the rows one by one, and finds a small batch still in the cache.
SPARK_BATCH_BYTES_MAX = 2 * MIB

# A transaction that alone passes this many bytes of decoded rows is handed out in several batches.
TRANSACTION_HELD_BYTES_MAX = 8 * BATCH_BYTES_MAX

# How much log is searched, back from its commit, for an XA transaction that was prepared before a range.
PREPARED_SEARCH_BYTES_MAX = 4 << 30
# How much log one pass of upkeep surveys for what is prepared.
PREPARED_SURVEY_BYTES = 1 << 30
# A prepared XA transaction without an outcome is shown after an hour, and no longer held after a week.
PREPARED_OLD_SECONDS = 3600
PREPARED_HOLD_SECONDS_MAX = 7 * 24 * 3600
# Of so many of them the status tells.
PREPARED_SHOWN_MAX = 100

# Words and marks that are read of a statement: the widest table with the most partitions has under 200,000.
STATEMENT_TOKENS_MAX = 250_000

# One event: the server's own ceiling for max_allowed_packet, plus its header.
EVENT_BYTES_MAX = (1 << 30) + 64 * 1024

# One read of rows from a server's socket, and the buffer that they lie in until they are decoded: one for
# each table that is read at the same time.
LOAD_READ_BYTES = MIB // 4
# A batch of rows that were read from a table: of these as many are held as tables are read at the same time.
LOAD_BATCH_ROWS_MAX = 16_384
LOAD_BATCH_BYTES_MAX = 2 * MIB
# A server that has to find the first row of a chunk, or waits for a lock, may be silent so long.
LOAD_SILENCE_SECONDS_MAX = 600.0
# A chunk of a table has about so many rows: few enough to be read again, many beside a task's own cost.
CHUNK_ROWS = 200_000

# Commit version: epoch and file number together (31 bits), start offset in units of 16 bytes (32).
EPOCH_MAX = (1 << 31) - 1
FILE_NUMBER_MAX = (1 << 23) - 1
# Epochs up to the first are counted, in 8 bits above 23 of the file number. A log counts to the second, which
# leaves half of the 31 bits for epochs that have a base.
EPOCH_COUNTED_MAX = (1 << 8) - 1
EPOCH_COUNTED_NEW_MAX = (1 << 7) - 1
OFFSET_MAX = (1 << 36) - 1

# Reconnecting: the pause doubles from the first to the longest, for so many tries without progress.
RECONNECT_PAUSE_SECONDS_FIRST = 0.1
RECONNECT_PAUSE_SECONDS_MAX = 10.0
RECONNECT_TRIES_MAX = 12

# A server may be away for `fail_over_after`, twice as long after each change of servers that is remembered,
# up to a bound.
FAIL_OVER_REMEMBERED_SECONDS = 3600.0
FAIL_OVER_SECONDS_MAX = 600.0

# A reader waits this long for a definition that is being read from its server, of which a daemon waits the
# second for one answer; then it fails with an error that may be tried again.
DEFINITION_PENDING_SECONDS_MAX = 10.0
DEFINITION_WAIT_SECONDS = 5.0
# A new log asks for its first bytes once the server's tables were read, or after this long.
SURVEY_WAIT_SECONDS = 5.0

# The server sends a heartbeat at this interval while idle; silence for three of them is a lost connection.
HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS_MAX = 3 * HEARTBEAT_SECONDS

# A file is cut into byte ranges of at least this size, so that what each range costs by itself is little.
RANGE_BYTES_MIN = 8 * MIB
RANGE_BYTES_DEFAULT = 128 * MIB

# What a reader may keep from leaving a log: for so long, in so many holds for each account, and up to so many
# bytes behind one, by default. A reader that lags further is told so, instead of filling the disk.
HOLD_SECONDS_MAX = 30 * 24 * 3600
HOLDS_PER_ACCOUNT_MAX = 1000
HOLD_BYTES_DEFAULT = 256 * 1024 * MIB
# Holds give way, the furthest back first, before they fill the disk and stop the capture.
HOLD_FREE_BYTES_DEFAULT = 1024 * MIB
# A named consumer that has not come back for this long holds nothing any longer.
HOLD_AGE_SECONDS_DEFAULT = 7 * 24 * 3600
# How long after a checkpoint has moved the hold of its consumer follows.
CONSUMER_HOLD_PAUSE_SECONDS = 10.0
# A pipeline tells the daemon how far it has got this often, behind a batch.
PIPELINE_HOLD_PAUSE_SECONDS = 60.0

# Files of which a process, and a host's folder for temporary files, remember where events begin: 8 bytes for
# each MiB of a file.
FILES_FOLLOWED_MAX = 256
FILES_REMEMBERED_MAX = 4096

# Connections to all listeners together, and from one address: each costs a descriptor and its buffers, and a
# fleet of subscribers on one host has hundreds.
CONNECTIONS_MAX = 4096
CONNECTIONS_PER_PEER_MAX = 1024
# Of these, connections in their TLS handshake, which have proved nothing yet.
HANDSHAKES_MAX = 1024
HANDSHAKES_PER_PEER_MAX = 256

# A request that has not arrived whole after so long, or is larger, is no request of a client of ours.
REQUEST_HEAD_BYTES_MAX = 64 * 1024
REQUEST_BODY_BYTES_MAX = MIB
REQUEST_SECONDS_MAX = 20.0

# Who connects over TLS, or must say first who it is, has so long for it.
GREETING_SECONDS_MAX = 10.0

# A connection on which nothing was asked for so long is closed.
HTTP_IDLE_SECONDS_MAX = 75.0

# What is under way when the daemon ends has so long to finish; who waits for news is woken at once.
DRAIN_SECONDS_MAX = 5.0

# Subscribers share what is decoded in pieces that end behind a line of this grid over the log, where they do
# not end at its head: small enough that many fit into memory, large enough that the cost of one vanishes.
PIECE_BYTES = MIB
# A large transaction is handed on in parts of about so many bytes of decoded rows, to whoever can take parts;
# to others it is one piece, and one that is larger than the second is refused.
PIECE_PART_BYTES = 16 * MIB
PIECE_BYTES_MAX = 512 * MIB
# A piece that is so short is decoded where it was asked for: to change threads would cost more.
PIECE_BYTES_AT_ONCE = 64 * 1024
# Under load short pieces of a view follow one another no faster than this: each costs its subscribers
# something, however little is in it.
PIECE_GAP_SECONDS = 0.001
# The pieces kept for those who come a little later, of all instances and views.
PIECES_BYTES_MAX = 128 * MIB
# A piece whose rows take no more is kept though nobody seems to follow: it may be asked for again.
SHARED_BYTES_ALWAYS = 256 * 1024
# Decoders that wait for more of the log, of one instance: one for each view at the head, and those behind.
FOLLOWERS_MAX = 64

# Drop a client that has not read any of what was sent to it for this long.
SEND_SECONDS_MAX = 300.0
# A subscriber that asks again within so long was never away.
SUBSCRIBER_SHOWN_SECONDS = 60
# How many subscribers that are between requests are shown, the latest ones.
SUBSCRIBERS_IDLE_SHOWN_MAX = 1000
# What a request for changes may ask for, and what it gets where it does not ask.
CREDIT_BYTES_DEFAULT = 16 * MIB
CREDIT_BYTES_MAX = 1 << 40
# Slots of shard keys lie below this; more shards would have none.
SLOTS = 32_767
SHARDS_MAX = SLOTS
# Table patterns and columns of one request: compiling them, and trying them on each table, takes time from
# others.
REQUEST_PATTERNS_MAX = 500
REQUEST_PATTERNS_BYTES_MAX = 64 * 1024
REQUEST_COLUMNS_MAX = 4096
# How long an answer waits for a change where the request does not say, and how long it may say.
WAIT_SECONDS_DEFAULT = 25.0
WAIT_SECONDS_MAX = 55.0

# A frame from a client of Canal holds a request, and the longest part of one is its filter.
CANAL_FRAME_BYTES_MAX = MIB
CANAL_GREETING_BYTES_MAX = 16 * 1024
# Who has named no other time may be silent for so long, as with Canal itself, and may name no longer one.
CANAL_IDLE_SECONDS_DEFAULT = 3600.0
CANAL_IDLE_SECONDS_MAX = 7 * 24 * 3600.0
# A wrong password may be a slip; more of them than this are not.
CANAL_GREETINGS_MAX = 5
# Canal's ring holds so many bytes by default, so that no batch is larger, but for one entry that alone is.
CANAL_BATCH_BYTES_MAX = 16 * MIB

# Whatever a client of Ptubes asks for, an answer has no more and no request waits longer: answers are held in
# memory, and that a client is gone is found out when it is answered.
PTUBES_FETCH_EVENTS_MAX = 65_536
PTUBES_FETCH_BYTES_MAX = 32 * MIB
PTUBES_FETCH_SECONDS_MAX = 10.0
# A client of Ptubes names each table by itself.
PTUBES_TABLES_MAX = 4096
# As much as Ptubes takes of a request. One that is too large for us is read so far: then its client reads the
# refusal.
PTUBES_BODY_BYTES_READ_MAX = 8 * MIB

# A record of coordination; ZooKeeper refuses a node of a mebibyte.
COORDINATION_RECORD_BYTES_MAX = 512 * 1024
# Each shard of a subscription has a lease and a checkpoint, and one record says who has which of them all.
SUBSCRIPTION_SHARDS_MAX = 4096

assert BATCH_BYTES_MAX <= TRANSACTION_HELD_BYTES_MAX < (1 << 31), "string columns carry 32-bit offsets"
assert RECONNECT_PAUSE_SECONDS_FIRST < RECONNECT_PAUSE_SECONDS_MAX
assert SILENCE_SECONDS_MAX > HEARTBEAT_SECONDS
assert RANGE_BYTES_MIN <= RANGE_BYTES_DEFAULT
assert CONNECTIONS_PER_PEER_MAX < CONNECTIONS_MAX
assert HANDSHAKES_PER_PEER_MAX < HANDSHAKES_MAX < CONNECTIONS_MAX
assert GREETING_SECONDS_MAX <= REQUEST_SECONDS_MAX < HTTP_IDLE_SECONDS_MAX
assert SUBSCRIPTION_SHARDS_MAX <= SHARDS_MAX
