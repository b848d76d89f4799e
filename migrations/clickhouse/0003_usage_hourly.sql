-- Sums by hour, recomputed whole from usage_events for the hours that inserts touched; never an incremental view.
-- An hour is replaced by one insert under a higher version: its groups of now, and zeros for those it has no more.
CREATE TABLE IF NOT EXISTS usage_hourly (
    hour DateTime('UTC'),
    tenant LowCardinality(String),
    model LowCardinality(String),
    base_model LowCardinality(String),
    key_id LowCardinality(String),
    adapter LowCardinality(String),
    endpoint LowCardinality(String),
    outcome LowCardinality(String),
    requests UInt64,
    prompt_tokens UInt128,
    cached_tokens UInt128,
    completion_tokens UInt128,
    reasoning_tokens UInt128,
    version UInt64
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toYYYYMM(hour)
ORDER BY (hour, tenant, model, base_model, key_id, adapter, endpoint, outcome)
SETTINGS
    non_replicated_deduplication_window = 0,
    fsync_after_insert = 1,
    fsync_part_directory = 1,
    min_rows_to_fsync_after_merge = 1;

-- Hours whose sums may lack something. A writer says so before it inserts events, and takes it back after it
-- has recomputed the hour; only it does, so what a crash left dirty stays so until its successor recomputed it. While an
-- hour is dirty, by whomever, its events are read instead of its sums.
CREATE TABLE IF NOT EXISTS usage_dirty_hours (
    hour DateTime('UTC'),
    writer LowCardinality(String),
    version UInt64,
    dirty Bool
)
ENGINE = ReplacingMergeTree(version)
ORDER BY (hour, writer)
SETTINGS non_replicated_deduplication_window = 0, fsync_after_insert = 1, fsync_part_directory = 1;
