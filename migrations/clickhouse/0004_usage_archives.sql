-- Months of events that lie in an archive. While `dropped` is false the table still has them as well; when it is true,
-- what it has of the month came later, and the month's hourly sums are of the archive.
CREATE TABLE IF NOT EXISTS usage_archives (
    month UInt32, -- 202611
    events UInt64, -- of the table that the archive holds, and their digest: what may be dropped
    digest String,
    dropped Bool,
    version UInt64
)
ENGINE = ReplacingMergeTree(version)
ORDER BY month
SETTINGS non_replicated_deduplication_window = 0, fsync_after_insert = 1, fsync_part_directory = 1;
