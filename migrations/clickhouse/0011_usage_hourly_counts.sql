-- Sums of what events have from version 3 on. A sum that was made before has layout 0 and lacks them: it stands for
-- nothing until its hour is recomputed, as an hour does that is dirty; who inserts without a layout makes such sums.
ALTER TABLE usage_hourly
    ADD COLUMN IF NOT EXISTS cache_write_tokens UInt128 DEFAULT 0 AFTER reasoning_tokens,
    ADD COLUMN IF NOT EXISTS images UInt128 DEFAULT 0 AFTER cache_write_tokens,
    ADD COLUMN IF NOT EXISTS audio_ms UInt128 DEFAULT 0 AFTER images,
    ADD COLUMN IF NOT EXISTS tool_calls UInt128 DEFAULT 0 AFTER audio_ms,
    ADD COLUMN IF NOT EXISTS layout UInt8 DEFAULT 0 AFTER version;
