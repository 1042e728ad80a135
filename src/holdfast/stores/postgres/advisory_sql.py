"""The SQL of advisory locks: a counter per name, and its holders and waiters for people.

The lock itself belongs to a session, on keys made from the name's digest: ``base`` for locks;
``base + 1`` is shared by all sessions that hold or wait for slots, ``base + 2`` is their queue,
``base + 3`` and up are the slots. Rows in ``queue`` and ``holders`` may be outdated: every reader
compares them with ``pg_locks``. A hold is identified there by its mark, the key ``base # token``:
a session that takes a name again has the key before its row is updated.

``@`` stands for schema and prefix, ``%word%`` for a text that ``schema`` fills in. Names of tables,
columns (``bell``, ``ring``), functions and their parameters are stored: they keep their spelling.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

__all__ = ["ADVISORY", "base_key"]


@lru_cache(maxsize=1024)
def base_key(namespace: str, name: str) -> int:
    """Returns the 64-bit key of a name. The keys after it are those of its slots."""
    digest = hashlib.sha256(f"{namespace}\0{name}".encode()).digest()
    key = int.from_bytes(digest[:8], signed=True)
    return key if key < 2**63 - 2**32 else key - 2**32


_TABLES = """
DO $$ BEGIN
  IF to_regtype('@session') IS NULL THEN
    CREATE TYPE @session AS (
      pid integer, mode text, weight integer, slots integer[], token bigint,
      since timestamptz, ttl float8, label text);
  END IF;
END $$;

CREATE TABLE IF NOT EXISTS @counter (
  namespace text COLLATE "C" NOT NULL,
  name text COLLATE "C" NOT NULL,
  base bigint NOT NULL UNIQUE,
  token bigint NOT NULL,
  capacity integer NOT NULL DEFAULT 0,
  holders @session[] NOT NULL DEFAULT '{}',
  bell text NOT NULL DEFAULT '',
  ring text NOT NULL DEFAULT '',
  used timestamptz NOT NULL,
  PRIMARY KEY (namespace, name)
) WITH (fillfactor = 50);

CREATE TABLE IF NOT EXISTS @queue (
  pid integer PRIMARY KEY,
  namespace text COLLATE "C" NOT NULL,
  name text COLLATE "C" NOT NULL,
  mode text NOT NULL,
  since timestamptz NOT NULL,
  behind integer NOT NULL DEFAULT 0,
  label text NOT NULL
) WITH (fillfactor = 50);

-- The advisory locks of this database by their 64-bit keys.
CREATE OR REPLACE VIEW @keys AS
  SELECT l.pid, (l.classid::bigint << 32) | l.objid::bigint AS key, l.granted
  FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 1
    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
"""

# Takes a token for a lock that this session has, and stores the session as a holder. Returns
# 'G token'; 'M capacity' if the name is in use as a semaphore; 'C' if another name has its key.
_COUNT = """
CREATE OR REPLACE FUNCTION @count(
  ns text, nm text, key bigint, md text, ttl float8, lbl text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  moment timestamptz := clock_timestamp();
  floor bigint := (extract(epoch FROM moment) * 1000000)::bigint;
  fence bigint;
  other integer;
BEGIN
  IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
  FOR i IN 1 .. 10 LOOP  -- again only if the row is purged between two statements
    UPDATE @counter c SET token = greatest(c.token + 1, floor), used = moment,
        holders = CASE WHEN md = 'exclusive' THEN '{}' ELSE @others(c.holders, c.base) END
          || ROW(pg_backend_pid(), md, 1, NULL, greatest(c.token + 1, floor), moment, ttl,
                 lbl)::@session
      WHERE c.namespace = ns AND c.name = nm AND c.capacity = 0 RETURNING c.token INTO fence;
    IF FOUND THEN
      PERFORM pg_advisory_lock_shared(key # fence);
      RETURN 'G ' || fence || ' ';
    END IF;
    INSERT INTO @counter AS c (namespace, name, base, token, used, holders)
      SELECT ns, nm, key, floor, moment,
        ARRAY[ROW(pg_backend_pid(), md, 1, NULL, floor, moment, ttl, lbl)::@session]
      WHERE NOT EXISTS (SELECT FROM @counter o WHERE o.namespace = ns AND o.name = nm)
      ON CONFLICT DO NOTHING RETURNING c.token INTO fence;
    IF FOUND THEN
      PERFORM pg_advisory_lock_shared(key # fence);
      RETURN 'G ' || fence || ' ';
    END IF;
    SELECT c.capacity INTO other FROM @counter c
      WHERE c.namespace = ns AND c.name = nm FOR UPDATE;
    IF NOT FOUND AND EXISTS (SELECT FROM @counter c WHERE c.base = key) THEN
      RETURN 'C';
    END IF;
    CONTINUE WHEN other IS NULL OR other = 0;
    -- It was a semaphore: it can become a lock if no slot is in use.
    IF NOT pg_try_advisory_xact_lock(key + 1) THEN
      PERFORM CASE WHEN md = 'shared' THEN pg_advisory_unlock_shared(key)
                   ELSE pg_advisory_unlock(key) END;
      RETURN 'M ' || other || ' ';
    END IF;
    UPDATE @counter c SET capacity = 0, holders = '{}', bell = ''
      WHERE c.namespace = ns AND c.name = nm;
  END LOOP;
  RAISE 'the counter of a lock vanishes again and again';
END $$;

-- The other stored holders; at times only those that still hold, to keep the list short.
CREATE OR REPLACE FUNCTION @others(noted @session[], key bigint) RETURNS @session[]
LANGUAGE plpgsql AS $$
BEGIN
  IF cardinality(noted) > 32 AND random() < 0.1 THEN
    RETURN ARRAY(SELECT h FROM unnest(noted) h WHERE h.pid <> pg_backend_pid()
      AND EXISTS (SELECT FROM @keys k WHERE k.pid = h.pid AND k.granted
        AND k.key BETWEEN key AND key + 2 + cardinality(noted)));
  END IF;
  RETURN ARRAY(SELECT h FROM unnest(noted) h WHERE h.pid <> pg_backend_pid());
END $$;

-- In PL/pgSQL, which keeps its plans: SQL functions are planned with every call.
CREATE OR REPLACE FUNCTION @line_up(ns text, nm text, md text, lbl text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO @queue AS q (pid, namespace, name, mode, since, label)
    VALUES (pg_backend_pid(), ns, nm, md, clock_timestamp(), lbl)
    ON CONFLICT (pid) DO UPDATE SET namespace = ns, name = nm, mode = md,
      since = clock_timestamp(), behind = 0, label = lbl;
END $$;
"""

# Returns 'G token', 'B' or 'M capacity'. `queued`: the session waited for the key and has it.
# `wait_take` waits and then takes the token, so that the client gets it with its wake-up. The
# session of a dead client has ended by then; a client that hangs loses its session as any holder.
_TAKE = """
CREATE OR REPLACE FUNCTION @take(
  ns text, nm text, key bigint, md text, ttl float8, lbl text, joins boolean, queued boolean)
RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
  IF queued THEN
    RETURN @count(ns, nm, key, md, ttl, lbl);
  END IF;
  PERFORM set_config('idle_session_timeout', ceil(ttl * 1000)::text, false);
  IF (CASE WHEN md = 'shared' THEN pg_try_advisory_lock_shared(key)
      ELSE pg_try_advisory_lock(key) END) THEN
    RETURN @count(ns, nm, key, md, ttl, lbl);
  END IF;
  IF joins THEN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM @line_up(ns, nm, md, lbl);
  END IF;
  RETURN 'B 0 ';
END $$;

CREATE OR REPLACE FUNCTION @wait_take(
  ns text, nm text, key bigint, md text, ttl float8, lbl text) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
  IF md = 'shared' THEN
    PERFORM pg_advisory_lock_shared(key);
  ELSE
    PERFORM pg_advisory_lock(key);
  END IF;
  RETURN @count(ns, nm, key, md, ttl, lbl);
END $$;
"""

# Returns 'G token slots', 'B' or 'M capacity'. `turn`: the session has the key of the queue, so it
# is the first waiter.
_SLOTS = """
CREATE OR REPLACE FUNCTION @take_slots(
  ns text, nm text, key bigint, wt integer, lim integer, ttl float8, lbl text, joins boolean,
  turn boolean, chan text, rng text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  c @counter;
  moment timestamptz;
  fence bigint;
  taking integer[] := '{}';
BEGIN
  PERFORM set_config('idle_session_timeout', ceil(ttl * 1000)::text, false);
  FOR i IN 1 .. 10 LOOP
    SELECT * INTO c FROM @counter o WHERE o.namespace = ns AND o.name = nm FOR UPDATE;
    EXIT WHEN FOUND;
    INSERT INTO @counter (namespace, name, base, token, capacity, used)
      VALUES (ns, nm, key, 0, lim, clock_timestamp()) ON CONFLICT DO NOTHING;
  END LOOP;
  IF c.base IS NULL THEN
    RETURN 'C';
  END IF;
  IF c.capacity <> lim THEN
    -- Its old use may have ended: its key, or the common key of its slots, is free then.
    IF NOT pg_try_advisory_xact_lock(CASE WHEN c.capacity = 0 THEN key ELSE key + 1 END) THEN
      RETURN 'M ' || c.capacity || ' ';
    END IF;
    c.holders := '{}';
  ELSIF NOT turn AND NOT pg_try_advisory_xact_lock_shared(key + 2) THEN
    RETURN @slots_busy(ns, nm, key, lbl, joins, turn, chan, rng);  -- there are waiters already
  END IF;
  FOR slot IN 0 .. lim - 1 LOOP
    EXIT WHEN cardinality(taking) >= wt;
    IF pg_try_advisory_lock(key + 3 + slot) THEN
      taking := taking || slot;
    END IF;
  END LOOP;
  IF cardinality(taking) < wt THEN
    PERFORM pg_advisory_unlock(key + 3 + slot) FROM unnest(taking) slot;
    UPDATE @counter o SET capacity = lim, holders = c.holders
      WHERE o.namespace = ns AND o.name = nm AND o.capacity <> lim;
    RETURN @slots_busy(ns, nm, key, lbl, joins, turn, chan, rng);
  END IF;
  IF NOT turn THEN
    PERFORM pg_advisory_lock_shared(key + 1);
  ELSE
    PERFORM pg_advisory_unlock(key + 2);
    DELETE FROM @queue q WHERE q.pid = pg_backend_pid();
  END IF;
  IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
  moment := clock_timestamp();
  fence := greatest(c.token + 1, (extract(epoch FROM moment) * 1000000)::bigint);
  PERFORM pg_advisory_lock_shared(key # fence);
  UPDATE @counter o SET token = fence, capacity = lim, used = moment,
      bell = CASE WHEN turn THEN '' ELSE o.bell END,
      holders = @others(c.holders, key)
        || ROW(pg_backend_pid(), 'slots', wt, taking, fence, moment, ttl, lbl)::@session
    WHERE o.namespace = ns AND o.name = nm;
  RETURN 'G ' || fence || ' ' || array_to_string(taking, ',');
END $$;

-- The first waiter stores its channel and wake-up; a session that joins keeps the limit unchanged.
CREATE OR REPLACE FUNCTION @slots_busy(
  ns text, nm text, key bigint, lbl text, joins boolean, turn boolean, chan text, rng text)
RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM @durable(false);
  IF turn THEN
    UPDATE @counter o SET bell = chan, ring = rng WHERE o.namespace = ns AND o.name = nm;
  ELSIF joins THEN
    PERFORM pg_advisory_lock_shared(key + 1);
    PERFORM @line_up(ns, nm, 'slots', lbl);
  END IF;
  RETURN 'B 0 ';
END $$;

-- The keys are free before the row is read: a first waiter that found no free slot has stored its
-- channel by then.
CREATE OR REPLACE FUNCTION @free_slots(
  ns text, nm text, key bigint, slots integer[], fence bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  ours boolean := true;
  c @counter;
BEGIN
  PERFORM @durable(false);
  FOR i IN 1 .. cardinality(slots) LOOP
    ours := pg_advisory_unlock(key + 3 + slots[i]) AND ours;
  END LOOP;
  PERFORM pg_advisory_unlock_shared(key # fence);
  PERFORM pg_advisory_unlock_shared(key + 1);
  IF NOT pg_try_advisory_xact_lock(key + 2) THEN
    SELECT * INTO c FROM @counter o WHERE o.namespace = ns AND o.name = nm FOR UPDATE;
    IF c.bell <> '' THEN
      PERFORM pg_notify(c.bell, c.ring);
    END IF;
  END IF;
  RETURN ours;
END $$;
"""

_REST = """
-- Releases everything that this session holds, and ends its wait.
CREATE OR REPLACE FUNCTION @leave() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM @durable(false);
  PERFORM pg_advisory_unlock_all();
  DELETE FROM @queue q WHERE q.pid = pg_backend_pid();
END $$;

CREATE OR REPLACE FUNCTION @set_ttl(ns text, nm text, seconds float8) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('idle_session_timeout', ceil(seconds * 1000)::text, false);
  PERFORM @durable(false);
  UPDATE @counter c SET holders = ARRAY(
      SELECT CASE WHEN h.pid = pg_backend_pid() THEN ROW(h.pid, h.mode, h.weight, h.slots,
        h.token, h.since, seconds, h.label)::@session ELSE h END FROM unnest(c.holders) h)
    WHERE c.namespace = ns AND c.name = nm;
END $$;

-- Ends a session, unless its pid belongs to a newer one, and waits until it has ended.
CREATE OR REPLACE FUNCTION @end_session(who integer, started timestamptz) RETURNS boolean
LANGUAGE sql AS $$
  SELECT coalesce(bool_and(pg_terminate_backend(a.pid, 1000)), true)
  FROM pg_stat_activity a WHERE a.pid = who AND a.backend_start = started;
$$;

CREATE OR REPLACE FUNCTION @holding(c @counter) RETURNS SETOF @session LANGUAGE sql AS $$
  SELECT h.* FROM unnest(c.holders) h WHERE EXISTS (
    SELECT FROM @keys k WHERE k.pid = h.pid AND k.granted AND k.key = c.base # h.token);
$$;

CREATE OR REPLACE FUNCTION @look_sessions(ns text, nm text)
RETURNS TABLE (name text, capacity integer, holders json, waiters json) LANGUAGE sql AS $$
  SELECT l.name, l.capacity,
    (SELECT json_agg(json_build_array(o.label, o.mode, o.token, o.slots,
        extract(epoch FROM o.since), o.ttl - CASE WHEN a.state = 'idle'
          THEN extract(epoch FROM clock_timestamp() - a.state_change) ELSE 0 END))
      FROM @holding(l) o LEFT JOIN pg_stat_activity a ON a.pid = o.pid),
    (SELECT json_agg(json_build_array(q.label, q.mode, extract(epoch FROM q.since), q.behind)
        ORDER BY q.since)
      FROM @queue q WHERE q.namespace = l.namespace AND q.name = l.name AND EXISTS (
        SELECT FROM @keys k WHERE k.pid = q.pid
          AND (k.key = l.base AND NOT k.granted OR k.key = l.base::numeric + 2)))
  FROM @counter l WHERE l.namespace = ns AND l.name = nm;
$$;

CREATE OR REPLACE FUNCTION @survey_sessions(ns text, pre text, after text, most integer)
RETURNS TABLE (name text, capacity integer, holders json, waiters json) LANGUAGE sql AS $$
  SELECT s.* FROM (SELECT l.name FROM @counter l WHERE l.namespace = ns AND l.name >= pre
      AND l.name > after AND l.name <= pre || repeat(chr(%highest%), 4)
      AND starts_with(l.name, pre) ORDER BY l.name LIMIT most) l, @look_sessions(ns, l.name) s
  ORDER BY l.name;
$$;

CREATE OR REPLACE FUNCTION @terminate(ns text, nm text) RETURNS text
LANGUAGE sql AS $$
  SELECT coalesce(string_agg(h.token::text, ','), '') FROM @counter c, @holding(c) h
  WHERE c.namespace = ns AND c.name = nm AND pg_terminate_backend(h.pid, 2000);
$$;

CREATE OR REPLACE FUNCTION @note_behind(waiting json) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM @durable(false);
  WITH mine AS (
    SELECT q.pid, (e ->> 1)::integer AS behind
    FROM json_array_elements(waiting) e JOIN @queue q ON q.pid = (e ->> 0)::integer
    FOR UPDATE OF q SKIP LOCKED)
  UPDATE @queue q SET behind = mine.behind FROM mine
    WHERE q.pid = mine.pid AND q.behind <> mine.behind;
END $$;

-- As ``purge`` does with lock rows.
CREATE OR REPLACE FUNCTION @purge_counters(ns text, after text, batch integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  start text := coalesce(after, @purged_to(ns, 'counter'));
  seen text;
  steps integer := 0;
  c record;
BEGIN
  PERFORM @durable(false);
  FOR c IN SELECT p.name, p.used, p.base FROM @counter p
           WHERE p.namespace = ns AND p.name > start ORDER BY p.name LIMIT batch LOOP
    seen := c.name;
    steps := steps + 1;
    CONTINUE WHEN c.used >= clock_timestamp() - interval '%idle% s';
    PERFORM FROM @counter d WHERE d.namespace = ns AND d.name = c.name
      AND d.used < clock_timestamp() - interval '%idle% s'
      AND d.token < extract(epoch FROM clock_timestamp()) * 1000000 FOR UPDATE SKIP LOCKED;
    IF FOUND AND pg_try_advisory_xact_lock(c.base)
        AND pg_try_advisory_xact_lock(c.base + 1) THEN
      DELETE FROM @counter d WHERE d.namespace = ns AND d.name = c.name;
    END IF;
  END LOOP;
  DELETE FROM @queue q WHERE NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = q.pid);
  PERFORM @purge_records(ns, batch);
  seen := CASE WHEN steps = batch THEN seen END;
  IF after IS NULL AND start <> coalesce(seen, '') THEN
    PERFORM @keep_record(ns, %position% || 'counter', coalesce(seen, ''), 0, 3e9);
  END IF;
  RETURN seen;
END $$;
"""

ADVISORY = _TABLES + _COUNT + _TAKE + _SLOTS + _REST
