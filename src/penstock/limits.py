# SPDX-License-Identifier: Apache-2.0
"""Every limit of the control plane, with its reason.

The kernel's own limits are in `native/kernel/src/limits.rs`.
"""

MIB = 1 << 20

# One read from a file or a socket: large enough to amortize the call, small enough for the CPU cache.
READ_BYTES = MIB

# Capture flushes its buffer at this size, or as soon as no more bytes are waiting.
CAPTURE_CHUNK_BYTES = 4 * MIB

# The log records its durable position at the first sync after this time has passed or this many bytes were
# written. Recovery reads everything after that position event by event.
POSITION_NOTED_SECONDS = 1.0
POSITION_NOTED_BYTES = 64 * MIB

# Under load, sync the log once this many bytes are waiting. Synced bytes are dropped from the page cache so
# that their memory is reused: on a virtual machine, touching new memory costs more than writing to disk.
LOG_SYNC_BYTES_MAX = 32 * MIB

# An Arrow batch closes at the end of the transaction in which it reaches either bound.
BATCH_ROWS_MAX = 65_536
# This bound is in bytes of row images. It is low, because touching new memory costs more than decoding into
# it, and a short range ends before it could reuse that memory.
BATCH_BYTES_MAX = 8 * MIB

# An Arrow batch for Spark. The JVM iterates over single rows, and a small batch stays in the CPU cache.
SPARK_BATCH_BYTES_MAX = 2 * MIB

# A transaction larger than this, in bytes of decoded rows, is delivered in several batches.
TRANSACTION_HELD_BYTES_MAX = 8 * BATCH_BYTES_MAX

# How far before an XA COMMIT the log is searched for its PREPARE, if the PREPARE is before the range being
# read.
PREPARED_SEARCH_BYTES_MAX = 4 << 30
# How much log one maintenance pass scans for prepared XA transactions.
PREPARED_SURVEY_BYTES = 1 << 30
# A prepared XA transaction without an outcome is reported after an hour. After a week it no longer holds the
# log.
PREPARED_OLD_SECONDS = 3600
PREPARED_HOLD_SECONDS_MAX = 7 * 24 * 3600
# The status lists at most this many prepared transactions.
PREPARED_SHOWN_MAX = 100

# Tokens read from one statement. The widest table with the most partitions needs fewer than 200,000.
STATEMENT_TOKENS_MAX = 250_000

# The largest event: the server's maximum for max_allowed_packet, plus headers.
EVENT_BYTES_MAX = (1 << 30) + 64 * 1024

# The size of one read of rows from a server's socket, and of the buffer that holds the rows until they are
# decoded. Each table read concurrently has its own buffer.
LOAD_READ_BYTES = MIB // 4
# A batch of rows read from a table. Each table read concurrently holds one batch.
LOAD_BATCH_ROWS_MAX = 16_384
LOAD_BATCH_BYTES_MAX = 2 * MIB
# Read timeout while the server looks for the first row of a chunk or waits for a lock.
LOAD_SILENCE_SECONDS_MAX = 600.0
# Approximate rows in a chunk of a table: few enough to read again, enough to amortize the cost of a task.
CHUNK_ROWS = 200_000
# A table of at most this many rows is loaded as one chunk without examining its key, and shares its task with
# other small tables.
SMALL_TABLE_ROWS = 1_000

# The commit version has 31 bits for epoch and file number, and 32 bits for the start offset in units of 16
# bytes.
EPOCH_MAX = (1 << 31) - 1
FILE_NUMBER_MAX = (1 << 23) - 1
# Epochs up to EPOCH_COUNTED_MAX are counted in the 8 bits above the file number's 23. New logs count only to
# EPOCH_COUNTED_NEW_MAX, which leaves half of the 31 bits for epochs that have a base.
EPOCH_COUNTED_MAX = (1 << 8) - 1
EPOCH_COUNTED_NEW_MAX = (1 << 7) - 1
# The largest start offset that 32 bits can hold in units of 16 bytes.
OFFSET_MAX = (1 << 36) - 1

# Reconnect backoff: pauses are random, and their bound doubles from the first to the longest. Retries stop
# after this many attempts without progress, about a minute.
RECONNECT_PAUSE_SECONDS_FIRST = 0.1
RECONNECT_PAUSE_SECONDS_MAX = 10.0
RECONNECT_TRIES_MAX = 18

# Fail-over starts once a server has been away for `fail_over_after`. Each fail-over within the remembered
# time doubles that delay, up to the maximum.
FAIL_OVER_REMEMBERED_SECONDS = 3600.0
FAIL_OVER_SECONDS_MAX = 600.0

# The maximum number of copies of a log. Each copy reads the whole log from the capturing member.
COPIES_MAX = 5

# How long a reader waits while a table definition is being read from the server. After that, the reader fails
# with a transient error. DEFINITION_WAIT_SECONDS is the part that a daemon spends on one response.
DEFINITION_PENDING_SECONDS_MAX = 10.0
DEFINITION_WAIT_SECONDS = 5.0
# A new log requests its first bytes once the server's table definitions are read, or after this long.
SURVEY_WAIT_SECONDS = 5.0

# Heartbeat interval of an idle server. After three missed heartbeats the connection counts as lost.
HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS_MAX = 3 * HEARTBEAT_SECONDS
# A subscriber with several daemons leaves a daemon that is silent for this long. This is shorter than the
# session time of a fleet member, so that the subscriber asks the other daemons before a frozen member's
# session ends.
DAEMON_SILENCE_SECONDS_MAX = 9.0

# A file is split into byte ranges of at least this size, so that the fixed cost of a range stays small.
RANGE_BYTES_MIN = 8 * MIB
RANGE_BYTES_DEFAULT = 128 * MIB
# The approximate number of rows of a share: a comparison reads a table in shares.
VERIFY_SHARE_ROWS_DEFAULT = 500_000

# Limits on holds, which protect a log from trimming: their lifetime, their number per account, and the bytes
# behind one hold. A reader that falls further behind gets an error instead of filling the disk.
HOLD_SECONDS_MAX = 30 * 24 * 3600
HOLDS_PER_ACCOUNT_MAX = 1000
HOLD_BYTES_DEFAULT = 256 * 1024 * MIB
# When less disk than this is free, holds are broken, oldest position first, before capture has to stop.
HOLD_FREE_BYTES_DEFAULT = 1024 * MIB
# The hold of a named consumer expires when the consumer has been away for this long.
HOLD_AGE_SECONDS_DEFAULT = 7 * 24 * 3600
# A consumer's hold follows its checkpoint with at most this delay.
CONSUMER_HOLD_PAUSE_SECONDS = 10.0
# A named consumer reports its checkpoint with each request, so a response to it ends after this time.
CONSUMER_RESPONSE_SECONDS = 30.0
# A pipeline reports its position to the daemon this often, after a batch.
PIPELINE_HOLD_PAUSE_SECONDS = 60.0

# Processes that share a local pipeline. Each process reads the whole log.
SHARDS_MAX = 64

# The maximum number of files whose event starts are cached, per process and in the host's temporary folder.
# The cache needs 8 bytes for each MiB of a file.
FILES_FOLLOWED_MAX = 256
FILES_REMEMBERED_MAX = 4096

# The maximum number of connections to all listeners together, and from one address. Each connection needs a
# file descriptor and buffers, and one host may run hundreds of subscribers.
CONNECTIONS_MAX = 4096
CONNECTIONS_PER_PEER_MAX = 1024
# How many connections may be unauthenticated or in their TLS handshake.
HANDSHAKES_MAX = 1024
HANDSHAKES_PER_PEER_MAX = 256

# Reject requests that are larger than this or take longer to arrive.
REQUEST_HEAD_BYTES_MAX = 64 * 1024
REQUEST_BODY_BYTES_MAX = MIB
REQUEST_SECONDS_MAX = 20.0

# Time limit for the TLS handshake or authentication.
GREETING_SECONDS_MAX = 10.0

# Close a connection that has sent no request for this long.
HTTP_IDLE_SECONDS_MAX = 75.0

# Shutdown: requests in progress have this long to drain. Requests that wait for changes are woken at once.
DRAIN_SECONDS_MAX = 5.0

# Subscribers share decoded pieces of the log. A piece ends after a multiple of this size, or at the head of
# the log: small enough that many fit into memory, large enough to amortize its fixed cost.
PIECE_BYTES = MIB
# A large transaction is sent in parts of about PIECE_PART_BYTES of decoded rows to clients that accept parts.
# Other clients get it in one piece, which is refused above PIECE_BYTES_MAX.
PIECE_PART_BYTES = 16 * MIB
PIECE_BYTES_MAX = 512 * MIB
# A piece this short is decoded in the requesting thread: switching threads would cost more.
PIECE_BYTES_AT_ONCE = 64 * 1024
# Minimum interval between short pieces of a view under load, because every piece has a fixed cost for its
# subscribers.
PIECE_GAP_SECONDS = 0.001
# The minimum interval is at least this time multiplied by the number of followers of the view. Sending a
# piece to a follower takes about half of this time, however few rows the piece has, so the followers of a
# view use about half of a core.
PIECE_GAP_FOLLOWER_SECONDS = 0.0001
# Cache of recent pieces for subscribers that follow shortly after, over all instances and views.
PIECES_BYTES_MAX = 128 * MIB
# A piece this small is cached even if no other subscriber follows: it may be requested again.
SHARED_BYTES_ALWAYS = 256 * 1024
# Decoders of one instance that wait for more log: one for each view at the head, plus those catching up.
FOLLOWERS_MAX = 64

# Drop a client that has not read any of what was sent to it for this long.
SEND_SECONDS_MAX = 300.0
# A subscriber that sends its next request within this time counts as connected throughout.
SUBSCRIBER_SHOWN_SECONDS = 60
# Idle subscribers listed in the status, most recent first.
SUBSCRIBERS_IDLE_SHOWN_MAX = 1000
# Clients choose the names of readers and holds, and each name becomes a time series. So the metrics name only
# the readers that were active last, and the holds that retain the most data.
METRICS_READERS_MAX = 500
METRICS_HOLDS_MAX = 50
# Concurrent searches for the history of a row. Each search keeps both cores of a small machine busy, and
# readers need them too.
HISTORIES_MAX = 2
# The maximum size of the rows of a table as of a moment. They are gathered in memory, for one table at a
# time.
AS_OF_BYTES_MAX = 256 * MIB
# A client that has kept its rows waiting for this long in total gives way to the next client that requests
# rows.
AS_OF_UNREAD_SECONDS_MAX = 60.0
# Bytes of changes in one response: the default, and the most a request may ask for.
CREDIT_BYTES_DEFAULT = 16 * MIB
CREDIT_BYTES_MAX = 1 << 40
# Shard keys hash to slots below this number, so more shards would stay empty.
SLOTS = 32_767
SHARDS_MAX = SLOTS
# Table patterns and columns of one request. Compiling and matching them takes time from other requests.
REQUEST_PATTERNS_MAX = 500
REQUEST_PATTERNS_BYTES_MAX = 64 * 1024
REQUEST_COLUMNS_MAX = 4096
# Long poll: how long a response waits for a change by default, and the longest wait a request may ask for.
WAIT_SECONDS_DEFAULT = 25.0
WAIT_SECONDS_MAX = 55.0

# A frame from a Canal client holds one request. Its longest part is the filter.
CANAL_FRAME_BYTES_MAX = MIB
CANAL_GREETING_BYTES_MAX = 16 * 1024
# Idle timeout for Canal clients that do not set one (Canal's own default), and the longest they may set.
CANAL_IDLE_SECONDS_DEFAULT = 3600.0
CANAL_IDLE_SECONDS_MAX = 7 * 24 * 3600.0
# Failed logins on one connection before it is closed.
CANAL_GREETINGS_MAX = 5
# Largest batch for a Canal client: the default size of Canal's ring buffer. A single larger entry forms its
# own batch.
CANAL_BATCH_BYTES_MAX = 16 * MIB

# Caps on what a Ptubes client may request. Responses are built in memory, and a disconnected client is
# noticed only when its response is written.
PTUBES_FETCH_EVENTS_MAX = 65_536
PTUBES_FETCH_BYTES_MAX = 32 * MIB
PTUBES_FETCH_SECONDS_MAX = 10.0
# Tables in one request. Ptubes clients list every table by name.
PTUBES_TABLES_MAX = 4096
# The original Ptubes accepts requests up to this size. A request above Penstock's own limit is read up to
# this size, so that its client receives the error response.
PTUBES_BODY_BYTES_READ_MAX = 8 * MIB

# Bytes of transactions that were read from some Pumps of a TiDB cluster and wait for another Pump. Once this
# size is reached, further transactions stay in the Pumps, which keep them for days.
DRAINER_BUFFER_BYTES_DEFAULT = 64 * MIB

# A coordination record. ZooKeeper refuses nodes of 1 MiB.
COORDINATION_RECORD_BYTES_MAX = 512 * 1024
# Each shard of a subscription has a lease and a checkpoint. One record lists the owners of all shards.
SUBSCRIPTION_SHARDS_MAX = 4096

# The number of recent outcomes that a Pump remembers, so that a binlog that its writer repeats is stored
# once.
PUMP_OUTCOMES_MAX = 65_536
# The maximum size of a Pump's group commit. A larger payload forms its own group.
PUMP_BATCH_BYTES_MAX = 32 * MIB
# The bytes of binlogs that wait for a Pump's disk. Above this limit the Pump refuses more, and writers use
# another Pump.
PUMP_WAITING_BYTES_MAX = 512 * MIB
# A gRPC message, which is a whole TiDB transaction: gRPC's Go clients send no larger one.
TIDB_MESSAGE_BYTES_MAX = (1 << 31) - 1
# Calls that run at once over one connection to a Pump or Drainer. Clients hold back further calls by
# themselves.
TIDB_CALLS_PER_CONNECTION_MAX = 512
# Bytes of incomplete calls to a Pump or Drainer that are kept in memory, over all connections. Above this
# limit, the connection with most of them is closed, and its senders repeat their calls.
TIDB_UNFINISHED_BYTES_MAX = 3072 * MIB
# The amount that a Pump reads from its log at a time for a Drainer, and the number of Drainers that it reads
# for at once.
PUMP_PULL_COUNT = 256
PUMP_PULL_BYTES = 4 * MIB
PUMP_PULLS_MAX = 8
# A Pump does not roll back an undecided transaction in the cluster before the transaction has been open for
# this long. The original Pump waits equally long.
PUMP_DECIDE_SECONDS_MIN = 600.0
# How long a thread in a process with a Pump keeps the interpreter lock while another thread waits for it. A
# group commit waits for the lock several times: with Python's default of 5 ms, writers would wait longer for
# the lock than for the disk.
PUMP_SWITCH_SECONDS_MAX = 0.0005
# How long a Pump that is ending waits for an answer from TiKV.
PUMP_STOP_SECONDS_MAX = 5.0

# A transaction in the form of TiDB-Binlog's Drainer: one record, which is held in memory whole.
DRAINER_TRANSACTION_BYTES_MAX = 1024 * MIB

# How many newly visible bytes of a log that another process writes are kept in memory; more are read from
# files.
FOLLOWED_BYTES_MAX = MIB // 4
# A capture process that reports nothing for this long is killed and started again.
PROCESS_SILENCE_SECONDS_MAX = 20.0
# The number of listener processes. Each has its own event loop and its own cache of decoded pieces.
LISTENER_PROCESSES_MAX = 64
# A capture process that ends this often at one position is set aside.
PROCESS_EXITS_MAX = 8

assert BATCH_BYTES_MAX <= TRANSACTION_HELD_BYTES_MAX < (1 << 31), "string columns carry 32-bit offsets"
assert RECONNECT_PAUSE_SECONDS_FIRST < RECONNECT_PAUSE_SECONDS_MAX
assert SILENCE_SECONDS_MAX > HEARTBEAT_SECONDS
assert RANGE_BYTES_MIN <= RANGE_BYTES_DEFAULT
assert CONNECTIONS_PER_PEER_MAX < CONNECTIONS_MAX
assert HANDSHAKES_PER_PEER_MAX < HANDSHAKES_MAX < CONNECTIONS_MAX
assert AS_OF_UNREAD_SECONDS_MAX < SEND_SECONDS_MAX
assert GREETING_SECONDS_MAX <= REQUEST_SECONDS_MAX < HTTP_IDLE_SECONDS_MAX
assert SUBSCRIPTION_SHARDS_MAX <= SHARDS_MAX
assert TIDB_MESSAGE_BYTES_MAX < TIDB_UNFINISHED_BYTES_MAX, "one message of any size fits"
