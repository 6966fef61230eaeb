"""The server's limits, each with its reason. A request that goes over one is refused by name and number."""

from __future__ import annotations

from headrace.types import MAX_LOGPROBS

# A request ---------------------------------------------------------------------------------------------------
MAX_BODY_BYTES = 8 * 2**20  # 2**20 ids are about 7 MB, the longest text (MAX_TOKENIZED_CHARS) 4 MiB at most
MAX_BODY_STRINGS = 2**16  # of a body: made in 50 ms; the most messages with three parts each are 45,000
MAX_OBJECT_BYTES = 2**20  # of all tools' arguments, or of the template's variables: at worst 30 ms to decode
MAX_TOKEN_IDS = 2**20  # of one request, written as numbers: 20 ms
MAX_TOKENIZED_CHARS = 2**20  # of one text, written or rendered: 0.4 s of work and 100 MB; 8 for each of 128 k tokens
MAX_HEADER_BYTES = 64 * 2**10  # browsers and proxies stay under 16 kB
MAX_SEQUENCES_PER_REQUEST = 128  # prompts times n: what one client may put into the queue at once
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one content
MAX_TOOL_CALLS = 128  # of one message
MAX_TOOLS = 128  # OpenAI's
MAX_TOP_LOGPROBS = MAX_LOGPROBS
MAX_SCORES = 2**20  # of one request, alternatives included: 26 MB of JSON, 170 MB of memory
MAX_NAME_CHARS = 256  # cache salts and the like
MAX_TEMPLATE_KWARGS = 64

# Load --------------------------------------------------------------------------------------------------------
MAX_OPEN_SEQUENCES = 1024  # running and waiting; above it a request is told to come back
RETRY_AFTER_S = 1
MAX_BUFFERED_BYTES = 128 * 2**20  # of all bodies at once: with what is made of them some 500 MB
SMALL_BODY_BYTES = 64 * 2**10  # bodies that do not count: as many as there may be connections are 56 MiB
MAX_CONNECTIONS = 896  # below the 1,024 file descriptors that a process usually may have
WORKERS = 2  # threads that decode large bodies, render templates and tokenize long texts
INLINE_CHARS = 2048  # shorter texts are tokenized on the event loop: under 1 ms, less than two thread switches cost
INLINE_BYTES = 16 * 2**10  # shorter bodies are decoded there
INLINE_PIECES = 128  # an answer of no more tokens with logprobs is written there
GATHERED_ITEMS = 256  # of a stream whose client is behind: so many pieces are written in one go
PROMPT_CHARS = 128  # what a prompt costs beside its text, in characters of text

# Time --------------------------------------------------------------------------------------------------------
HEADER_TIMEOUT_S = 10.0  # from the connection, or from a request's first byte, to the end of its headers
BODY_TIMEOUT_S = 60.0  # 8 MiB at 1.1 Mbit/s
SEND_TIMEOUT_S = 30.0  # a client that reads nothing for so long is gone
LINGER_S = 1.0  # a client that gets its answer while it sends, 413 say, may finish, and read it; less than serve.TAIL_S
KEEP_ALIVE_S = 75  # longer than what load balancers keep, so that they and not we close an idle connection
STALL_S = 60.0  # a step that takes longer makes the server unhealthy
WATCH_S = 5.0  # between two looks at whether it is
GRACE_S = 30.0  # what SIGTERM gives to the answers under way

# What goes back ----------------------------------------------------------------------------------------------
MAX_REPORTED_FIELDS = 32  # names in x-ignored-fields
MAX_ECHOED_CHARS = 128  # of a client's own words in a header, a log line or an error
