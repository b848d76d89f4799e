-- What a request took of the engine: fields of events from version 2 on. Events of version 1, stored before or
-- inserted after, have 0 in them; their bytes and hashes do not cover them. Signed: a measurement stops no event.
ALTER TABLE usage_events
    ADD COLUMN IF NOT EXISTS compute_us Int64 DEFAULT 0 AFTER duration_us,
    ADD COLUMN IF NOT EXISTS kv_block_us Int64 DEFAULT 0 AFTER compute_us,
    ADD COLUMN IF NOT EXISTS preemptions Int64 DEFAULT 0 AFTER kv_block_us;
