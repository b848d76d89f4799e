-- What can have a price of its own: fields of events from version 3 on. Events of versions 1 and 2, stored before or
-- inserted after, have 0 in them; their bytes and hashes do not cover them.
ALTER TABLE usage_events
    ADD COLUMN IF NOT EXISTS cache_write_tokens UInt64 DEFAULT 0 AFTER preemptions,
    ADD COLUMN IF NOT EXISTS images UInt64 DEFAULT 0 AFTER cache_write_tokens,
    ADD COLUMN IF NOT EXISTS audio_ms UInt64 DEFAULT 0 AFTER images,
    ADD COLUMN IF NOT EXISTS tool_calls UInt64 DEFAULT 0 AFTER audio_ms;
