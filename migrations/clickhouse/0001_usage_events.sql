-- Usage events. Inserted at least once, counted once: a replay has the same sort key and is merged away;
-- reads use FINAL. content_hash stands in the key, so a second event of one id with other content is kept
-- beside the first and found. precedence falls with the time of arrival: of equal rows the first stays.
CREATE TABLE IF NOT EXISTS usage_events (
    v UInt16,
    event_id String,
    ts DateTime64(6, 'UTC'),
    settled DateTime64(6, 'UTC'),
    tenant LowCardinality(String),
    key_id LowCardinality(String),
    model LowCardinality(String),
    base_model LowCardinality(String),
    adapter LowCardinality(String),
    endpoint LowCardinality(String),
    gateway LowCardinality(String),
    outcome LowCardinality(String),
    finish_reason LowCardinality(String),
    prompt_tokens UInt64,
    cached_tokens UInt64,
    completion_tokens UInt64,
    reasoning_tokens UInt64,
    recomputed_tokens UInt64,
    rejected_tokens UInt64,
    n UInt32,
    stream Bool,
    estimated Bool,
    user String,
    metadata Map(String, String),
    queue_us Int64,
    ttft_us Int64,
    duration_us Int64,
    content_hash String,
    precedence UInt64 DEFAULT toUInt64(9223372036854775807 - toUnixTimestamp64Micro(now64(6))),
    CONSTRAINT cached_within_prompt CHECK cached_tokens <= prompt_tokens,
    CONSTRAINT reasoning_within_completion CHECK reasoning_tokens <= completion_tokens,
    CONSTRAINT identified CHECK event_id != '' AND tenant != '' AND model != ''
)
ENGINE = ReplacingMergeTree(precedence)
PARTITION BY toYYYYMM(ts)
ORDER BY (toStartOfHour(ts), tenant, model, event_id, content_hash)
SETTINGS
    non_replicated_deduplication_window = 0, -- its log is written before the part: a kill between loses a batch
    fsync_after_insert = 1,
    fsync_part_directory = 1,
    min_rows_to_fsync_after_merge = 1;

-- Contents that came second under an id that has another: kept in usage_events, counted nowhere.
CREATE TABLE IF NOT EXISTS usage_conflicts (
    event_id String,
    content_hash String,
    found DateTime64(6, 'UTC') DEFAULT now64(6)
)
ENGINE = ReplacingMergeTree
ORDER BY (event_id, content_hash)
SETTINGS non_replicated_deduplication_window = 0, fsync_after_insert = 1, fsync_part_directory = 1;

-- Events that the table above cannot take, as their canonical bytes, with the reason.
CREATE TABLE IF NOT EXISTS usage_dead_letters (
    event_id String,
    content_hash String,
    reason String,
    body String,
    buried DateTime64(6, 'UTC') DEFAULT now64(6)
)
ENGINE = ReplacingMergeTree
ORDER BY (event_id, content_hash)
SETTINGS non_replicated_deduplication_window = 0, fsync_after_insert = 1, fsync_part_directory = 1;
