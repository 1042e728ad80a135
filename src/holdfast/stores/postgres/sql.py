"""The SQL of lease rows: tables, admission, renewal, release, inspection.

One function call changes a name, and locks the name's row (``lock``) first. The holders are in that
row. The queue is a table of its own (``waiter``), which is only used with the row locked, except
that a client refreshes its own entries. All times are the server's.

``@`` stands for schema and prefix, ``%word%`` for a text that ``schema`` fills in. Names of tables,
columns (``bell``: the channel of a waiter's client; ``ring``: the text of its wake-up), functions,
parameters and variables (``heir``: the next waiter) are stored: they keep their spelling.
"""

from __future__ import annotations

__all__ = ["LEASE_ADMISSION", "LEASE_KEEPING", "LEASE_LOOK", "LEASE_TABLES"]

LEASE_TABLES = """
DO $$ BEGIN
  IF to_regtype('@holder') IS NULL THEN
    CREATE TYPE @holder AS (
      owner text, mode text, weight integer, slots integer[], token bigint,
      since timestamptz, ends timestamptz, label text);
  END IF;
END $$;

CREATE TABLE IF NOT EXISTS @lock (
  namespace text COLLATE "C" NOT NULL,
  name text COLLATE "C" NOT NULL,
  token bigint NOT NULL,
  capacity integer NOT NULL,
  crowded boolean NOT NULL DEFAULT false,
  holders @holder[] NOT NULL DEFAULT '{}',
  used timestamptz NOT NULL,
  PRIMARY KEY (namespace, name)
) WITH (fillfactor = 50, toast_tuple_target = 8160);

CREATE TABLE IF NOT EXISTS @waiter (
  namespace text COLLATE "C" NOT NULL,
  name text COLLATE "C" NOT NULL,
  place bigint NOT NULL,
  owner text COLLATE "C" NOT NULL UNIQUE,
  mode text NOT NULL,
  weight integer NOT NULL,
  since timestamptz NOT NULL,
  refreshed timestamptz NOT NULL,
  reserved timestamptz,
  behind integer NOT NULL DEFAULT 0,
  bell text NOT NULL,
  ring text NOT NULL,
  label text NOT NULL,
  PRIMARY KEY (namespace, name, place)
) WITH (fillfactor = 50);
"""

# Drops expired holders and absent waiters, and wakes the waiters that now fit: `core.admit` in SQL.
_TIDY = """
CREATE OR REPLACE FUNCTION @tidy(r @lock, own text, moment timestamptz) RETURNS @lock
LANGUAGE plpgsql AS $$
DECLARE
  h @holder;
  q @waiter;
  kept @holder[] := '{}';
  heads integer := 0;
  weights bigint := 0;
  alone boolean := false;
BEGIN
  FOREACH h IN ARRAY r.holders LOOP
    IF h.ends > moment THEN
      kept := kept || h;
      heads := heads + 1;
      weights := weights + h.weight;
      alone := alone OR h.mode = 'exclusive';
    END IF;
  END LOOP;
  r.holders := kept;
  IF NOT r.crowded THEN
    RETURN r;
  END IF;
  r.crowded := false;
  FOR q IN SELECT w.* FROM @waiter w WHERE w.namespace = r.namespace AND w.name = r.name
           ORDER BY w.place LOOP
    IF NOT (%fresh%) THEN
      DELETE FROM @waiter w WHERE w.owner = q.owner;
      CONTINUE;
    END IF;
    r.crowded := true;
    EXIT WHEN NOT CASE q.mode WHEN 'exclusive' THEN heads = 0 WHEN 'shared' THEN NOT alone
                  ELSE weights + q.weight <= r.capacity END;
    IF q.reserved IS NULL THEN
      UPDATE @waiter w SET reserved = moment + interval '%grace% s'
        WHERE w.owner = q.owner;
      IF q.owner <> own THEN
        PERFORM pg_notify(q.bell, split_part(q.ring, ' ', 1));
      END IF;
    END IF;
    heads := heads + 1;
    weights := weights + q.weight;
    alone := alone OR q.mode = 'exclusive';
  END LOOP;
  RETURN r;
END $$;
"""

# Grants, renewals and releases survive a crash of the server. Waiters restore their queue entries
# themselves, so changes of the queue do not wait for the disk.
_DURABILITY = """
CREATE OR REPLACE FUNCTION @durable(yes boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF yes THEN
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
      PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
  ELSE
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
END $$;
"""

# Returns 'G token slots', 'B place seconds', 'F place' (the queue is full), 'M capacity' or 'D'
# (the row is damaged). A `rng` of two words is that of a waiter that takes a direct grant: the
# second word is the seconds that the grant lasts. The wake-up then has the token in its place, and
# 'B' ends with the last token of the name. A client that is in the queue already, or knows of
# other waiters, calls `join` or `attempt_locked` directly.
_ATTEMPT = """
CREATE OR REPLACE FUNCTION @attempt(
  ns text, nm text, own text, md text, wt integer, lim integer, ttl float8, lbl text,
  chan text, rng text, joins boolean) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  moment timestamptz := clock_timestamp();
  floor bigint := (extract(epoch FROM moment) * 1000000)::bigint;
  ending timestamptz := moment + make_interval(secs => ttl);
  taking integer[] := CASE WHEN md = 'slots' THEN ARRAY(SELECT generate_series(0, wt - 1)) END;
  fence bigint;
  done text;
BEGIN
  IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
  -- No holder and no waiter: one statement on one row decides.
  UPDATE @lock l
    SET token = greatest(l.token + 1, floor), capacity = lim, used = moment,
        holders = ARRAY[ROW(own, md, wt, taking, greatest(l.token + 1, floor), moment, ending,
                            lbl)::@holder]
    WHERE l.namespace = ns AND l.name = nm AND l.holders = '{}' AND NOT l.crowded
      AND (lim = 0 OR wt <= lim)
    RETURNING l.token INTO fence;
  IF NOT FOUND AND (lim = 0 OR wt <= lim) THEN  -- or the name has no row yet
    INSERT INTO @lock AS l (namespace, name, token, capacity, used, holders)
      VALUES (ns, nm, floor, lim, moment,
        ARRAY[ROW(own, md, wt, taking, floor, moment, ending, lbl)::@holder])
      ON CONFLICT DO NOTHING RETURNING l.token INTO fence;
  END IF;
  IF FOUND THEN
    RETURN 'G ' || fence || ' ' || coalesce(array_to_string(taking, ','), '');
  END IF;
  IF joins AND md = 'exclusive' THEN
    IF current_setting('holdfast.ready', true) IS DISTINCT FROM 'yes' THEN
      -- Plans the statements of `join` before the row is locked: planning is slow and done once per
      -- session, and many sessions may need it at the same moment.
      done := set_config('holdfast.ready', 'yes', false);
      done := @join(ns, '', own, md, wt, lim, ttl, lbl, chan, rng, joins);
    END IF;
    RETURN @join(ns, nm, own, md, wt, lim, ttl, lbl, chan, rng, joins);
  END IF;
  RETURN @attempt_locked(ns, nm, own, md, wt, lim, ttl, lbl, chan, rng, joins);
END $$;
"""

_ATTEMPT_LOCKED = """
CREATE OR REPLACE FUNCTION @grant(
  r @lock, own text, md text, wt integer, lim integer, ttl float8, lbl text, taking integer[],
  moment timestamptz) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  fence bigint := greatest(r.token + 1, (extract(epoch FROM moment) * 1000000)::bigint);
BEGIN
  IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
  UPDATE @lock l SET token = fence, capacity = lim, crowded = r.crowded, used = moment,
      holders = r.holders || ROW(own, md, wt, taking, fence, moment,
        moment + make_interval(secs => ttl), lbl)::@holder
    WHERE l.namespace = r.namespace AND l.name = r.name;
  RETURN 'G ' || fence || ' ' || coalesce(array_to_string(taking, ','), '');
END $$;

CREATE OR REPLACE FUNCTION @attempt_locked(
  ns text, nm text, own text, md text, wt integer, lim integer, ttl float8, lbl text,
  chan text, rng text, joins boolean) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  r @lock;
  was @lock;
  h @holder;
  moment timestamptz;
  mine bigint;
  ahead bigint := 0;
  weights bigint := 0;
  alone boolean := false;
  soonest timestamptz;
  taking integer[];
  done text;  -- an assignment costs less than a statement of its own
BEGIN
  FOR i IN 1 .. 100 LOOP  -- again only if the row is made or purged between the two
    SELECT * INTO r FROM @lock l WHERE l.namespace = ns AND l.name = nm FOR UPDATE;
    moment := clock_timestamp();
    EXIT WHEN FOUND;
    PERFORM @durable(true);
    IF md = 'slots' THEN
      taking := ARRAY(SELECT generate_series(0, wt - 1));
    END IF;
    INSERT INTO @lock AS l (namespace, name, token, capacity, used, holders)
      SELECT ns, nm, f, lim, moment, ARRAY[ROW(own, md, wt, taking, f, moment,
        moment + make_interval(secs => ttl), lbl)::@holder]
      FROM (VALUES ((extract(epoch FROM moment) * 1000000)::bigint)) AS v (f)
      WHERE lim = 0 OR wt <= lim
      ON CONFLICT DO NOTHING RETURNING l.token INTO r.token;
    IF FOUND THEN
      RETURN 'G ' || r.token || ' ' || coalesce(array_to_string(taking, ','), '');
    END IF;
  END LOOP;
  IF md = 'exclusive' AND r.crowded AND r.holders = '{}' THEN  -- a release has reserved it
    DELETE FROM @waiter q WHERE q.owner = own AND NOT EXISTS (SELECT FROM @waiter o
      WHERE o.namespace = q.namespace AND o.name = q.name AND o.place < q.place);
    IF FOUND THEN
      RETURN @grant(r, own, md, wt, lim, ttl, lbl, NULL, moment);
    END IF;
  END IF;
  was := r;
  FOR i IN 1 .. cardinality(r.holders) LOOP
    h := r.holders[i];
    IF (h.owner <> '' AND h.mode IN ('exclusive', 'shared', 'slots') AND h.weight >= 0
        AND h.token >= 0 AND isfinite(h.ends) AND isfinite(h.since)) IS NOT TRUE THEN
      RETURN 'D';  -- no version writes this: the holders are unknown
    END IF;
    IF h.owner = own AND h.ends > moment THEN  -- a retry whose first reply was lost
      PERFORM @durable(true);
      UPDATE @lock l SET holders[i].ends = greatest(h.ends, moment + make_interval(secs => ttl)),
          used = moment
        WHERE l.namespace = ns AND l.name = nm;
      RETURN 'G ' || h.token || ' ' || coalesce(array_to_string(h.slots, ','), '');
    END IF;
  END LOOP;
  IF cardinality(r.holders) <> 1 OR h.mode <> 'exclusive' OR h.ends <= moment THEN
    r := @tidy(r, own, moment);  -- else one exclusive holder has it: no waiter fits
  END IF;
  IF r.crowded THEN
    SELECT q.place INTO mine FROM @waiter q WHERE q.owner = own;
    SELECT count(*), coalesce(sum(q.weight), 0), coalesce(bool_or(q.mode = 'exclusive'), false),
           min(q.reserved) INTO ahead, weights, alone, soonest
      FROM @waiter q WHERE q.namespace = ns AND q.name = nm
      AND (mine IS NULL OR q.place < mine) AND %fresh%;
  END IF;
  IF r.capacity <> lim THEN
    IF r.holders <> '{}' OR ahead > 0 OR r.crowded AND EXISTS (
        SELECT FROM @waiter q WHERE q.namespace = ns AND q.name = nm AND q.owner <> own
        AND %fresh%) THEN
      RETURN 'M ' || r.capacity || ' ';
    END IF;
  END IF;
  FOREACH h IN ARRAY r.holders LOOP
    weights := weights + h.weight;
    alone := alone OR h.mode = 'exclusive';
    soonest := least(soonest, h.ends);
  END LOOP;
  IF (CASE md WHEN 'exclusive' THEN ahead = 0 AND r.holders = '{}' WHEN 'shared' THEN NOT alone
      ELSE weights + wt <= lim END) THEN
    IF md = 'slots' THEN
      taking := ARRAY(SELECT s FROM generate_series(0, lim - 1) s WHERE NOT EXISTS (
        SELECT FROM unnest(r.holders) o WHERE s = ANY (o.slots)) ORDER BY s LIMIT wt);
    END IF;
    IF mine IS NOT NULL THEN
      DELETE FROM @waiter q WHERE q.owner = own;
    END IF;
    RETURN @grant(r, own, md, wt, lim, ttl, lbl, taking, moment);
  END IF;
  done := set_config('synchronous_commit', 'off', true);
  IF mine IS NOT NULL THEN
    UPDATE @waiter q SET refreshed = moment, reserved = NULL, bell = chan, ring = rng
      WHERE q.owner = own;
  ELSIF joins THEN
    IF ahead >= %cap% THEN
      RETURN 'F ' || ahead || ' ';
    END IF;
    INSERT INTO @waiter (namespace, name, place, owner, mode, weight, since, refreshed, bell,
                         ring, label)
      SELECT ns, nm, coalesce(max(q.place), 0) + 1, own, md, wt, moment, moment, chan, rng, lbl
      FROM @waiter q WHERE q.namespace = ns AND q.name = nm;
    r.crowded := true;
    r.capacity := lim;
  END IF;
  IF r.holders IS DISTINCT FROM was.holders OR r.crowded <> was.crowded
      OR r.capacity <> was.capacity THEN
    UPDATE @lock l SET holders = r.holders, crowded = r.crowded, capacity = r.capacity,
      used = moment WHERE l.namespace = ns AND l.name = nm;
  END IF;
  RETURN 'B ' || ahead || ' ' || coalesce(extract(epoch FROM soonest - moment)::text, '')
    || CASE WHEN rng LIKE '% _%' THEN ' ' || r.token ELSE '' END;
END $$;
"""

# The common case of an exclusive claim that must wait: there is one exclusive holder. All other
# cases go to `attempt_locked`. For the empty name, which has no row, it only plans its statements.
_JOIN = """
CREATE OR REPLACE FUNCTION @join(
  ns text, nm text, own text, md text, wt integer, lim integer, ttl float8, lbl text,
  chan text, rng text, joins boolean) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  held record;
  line record;
  moment timestamptz;
  done text;
BEGIN
  SELECT l.token, l.crowded, (l.holders[1]).ends INTO held FROM @lock l
    WHERE l.namespace = ns AND l.name = nm AND l.capacity = lim AND cardinality(l.holders) = 1
      AND (l.holders[1]).mode = md AND (l.holders[1]).owner <> own
      AND (l.holders[1]).ends > clock_timestamp() AND (l.holders[1]).ends < 'infinity'
      AND (l.holders[1]).weight >= 0 AND (l.holders[1]).token >= 0
      AND isfinite((l.holders[1]).since) FOR UPDATE;  -- else it may be damaged
  IF FOUND OR nm = '' THEN
    moment := clock_timestamp();
    SELECT coalesce(max(q.place), 0) + 1 AS place, bool_or(o.stands) AS stands, count(*) FILTER (
        WHERE %fresh% AND (o.place IS NULL OR q.place < o.place)) AS ahead INTO line
      FROM @waiter q, (SELECT max(w.place) AS place, bool_and(w.name = nm AND w.bell = chan
          AND w.ring = rng AND w.reserved IS NULL AND w.refreshed > moment - interval '1 s')
          AS stands FROM @waiter w WHERE w.owner = own) o
      WHERE q.namespace = ns AND q.name = nm;
    IF line.stands IS NULL AND line.ahead < %cap% THEN
      done := set_config('synchronous_commit', 'off', true);
      INSERT INTO @waiter (namespace, name, place, owner, mode, weight, since, refreshed, bell,
                           ring, label)
        SELECT ns, nm, line.place, own, md, wt, moment, moment, chan, rng, lbl WHERE nm <> '';
      IF NOT held.crowded THEN
        UPDATE @lock l SET crowded = true, used = moment WHERE l.namespace = ns AND l.name = nm;
      END IF;
    END IF;
    IF line.stands OR done <> '' THEN  -- else its entry is not fresh, or the queue is full
      RETURN 'B ' || line.ahead || ' ' || extract(epoch FROM held.ends - moment)
        || CASE WHEN rng LIKE '% _%' THEN ' ' || held.token ELSE '' END;
    END IF;
  END IF;
  RETURN @attempt_locked(ns, nm, own, md, wt, lim, ttl, lbl, chan, rng, joins);
END $$;
"""

LEASE_ADMISSION = _DURABILITY + _TIDY + _ATTEMPT_LOCKED + _JOIN + _ATTEMPT

_RELEASE = """
-- `heir` is not notified: the caller attempts for it in the same call.
CREATE OR REPLACE FUNCTION @free(ns text, nm text, own text, heir text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  r @lock;
  was @lock;
  next_one record;
  moment timestamptz;
  ours boolean := false;
BEGIN
  IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
  UPDATE @lock l SET holders = '{}', used = clock_timestamp()
    WHERE l.namespace = ns AND l.name = nm AND NOT l.crowded AND cardinality(l.holders) = 1
      AND (l.holders[1]).owner = own AND (l.holders[1]).ends > clock_timestamp();
  IF FOUND THEN
    RETURN true;
  END IF;
  SELECT * INTO r FROM @lock l WHERE l.namespace = ns AND l.name = nm FOR UPDATE;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  was := r;
  moment := clock_timestamp();
  IF r.crowded AND cardinality(r.holders) = 1 AND (r.holders[1]).owner = own THEN
    SELECT q.owner, q.mode, q.reserved, q.bell, q.ring INTO next_one FROM @waiter q
      WHERE q.namespace = ns AND q.name = nm AND %fresh% ORDER BY q.place LIMIT 1;
    IF next_one.mode = 'exclusive' THEN  -- the common case: an exclusive waiter follows
      -- That waiter's grant waits for the disk, which includes this commit.
      PERFORM set_config('synchronous_commit', 'off', true);
      IF next_one.reserved IS NULL THEN
        UPDATE @waiter q SET reserved = moment + interval '%grace% s'
          WHERE q.owner = next_one.owner;
        IF next_one.owner <> heir THEN
          PERFORM pg_notify(next_one.bell, split_part(next_one.ring, ' ', 1));
        END IF;
      END IF;
      UPDATE @lock l SET holders = '{}', used = moment WHERE l.namespace = ns AND l.name = nm;
      RETURN (r.holders[1]).ends > moment;
    END IF;
  END IF;
  FOR i IN 1 .. cardinality(r.holders) LOOP
    IF (r.holders[i]).owner = own THEN
      ours := (r.holders[i]).ends > moment;
      r.holders[i].ends := moment;  -- tidying drops it
    END IF;
  END LOOP;
  r := @tidy(r, heir, moment);
  -- Nothing of ours has ended, or a waiter's grant follows: no need to wait for the disk here.
  IF NOT ours OR r.crowded AND EXISTS (SELECT FROM @waiter q
      WHERE q.namespace = ns AND q.name = nm AND q.reserved >= moment) THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
  IF r IS DISTINCT FROM was THEN
    UPDATE @lock l SET holders = r.holders, crowded = r.crowded, used = moment
      WHERE l.namespace = ns AND l.name = nm;
  END IF;
  RETURN ours;
END $$;

-- A release. The first waiter, if it takes direct grants, is granted the lock with its wake-up: for
-- a part of its ttl, since it may no longer be alive. It renews the grant or attempts again.
-- `ours` is passed as true if the caller has waited itself, so that there may be more waiters. For
-- the empty name, which has no row, it only plans its statements.
-- The grant is on disk before the notification is sent, in two commits: a commit that notifies
-- blocks all others that notify, in the whole database, and would block them during the disk write.
-- A procedure that commits can't have a search_path of its own (SET): it sets one for each
-- transaction, and looks nothing up before.
CREATE OR REPLACE PROCEDURE @hand_over(ns text, nm text, own text, INOUT ours boolean)
LANGUAGE plpgsql AS $$
DECLARE
  r @lock;
  heir pg_catalog.record;
  moment pg_catalog.timestamptz;
  fence pg_catalog.int8;
  done pg_catalog.text;
BEGIN
  done := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    COMMIT;  -- a transaction that has read anything can't change its isolation
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    done := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  END IF;
  IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
    done := set_config('synchronous_commit', 'on', true);
  END IF;
  IF NOT ours THEN
    UPDATE @lock l SET holders = '{}', used = clock_timestamp()
      WHERE l.namespace = ns AND l.name = nm AND NOT l.crowded AND cardinality(l.holders) = 1
        AND (l.holders[1]).owner = own AND (l.holders[1]).ends > clock_timestamp();
    IF FOUND THEN
      ours := true;
      RETURN;
    END IF;
  END IF;
  SELECT * INTO r FROM @lock l WHERE l.namespace = ns AND l.name = nm FOR UPDATE;
  moment := clock_timestamp();
  IF nm = '' OR r.crowded AND cardinality(r.holders) = 1 AND (r.holders[1]).owner = own
      AND (r.holders[1]).ends > moment THEN
    DELETE FROM @waiter q WHERE q.namespace = ns AND q.name = nm AND q.place = (
        SELECT o.place FROM @waiter o WHERE o.namespace = ns AND o.name = nm
        ORDER BY o.place LIMIT 1)
      AND q.mode = 'exclusive' AND q.reserved IS NULL AND q.ring LIKE '% _%' AND %fresh%
      RETURNING q.owner, q.weight, q.bell, q.ring, q.label INTO heir;
    IF FOUND OR nm = '' THEN
      fence := greatest(r.token + 1, (extract(epoch FROM moment) * 1000000)::bigint);
      UPDATE @lock l SET token = fence, used = moment, holders = ARRAY[ROW(heir.owner, 'exclusive',
          heir.weight, NULL, fence, moment,
          moment + make_interval(secs => split_part(heir.ring, ' ', 2)::float8),
          heir.label)::@holder]
        WHERE l.namespace = ns AND l.name = nm;
      IF nm = '' THEN
        RETURN;
      END IF;
      COMMIT;
      done := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      done := set_config('synchronous_commit', 'off', true);
      done := pg_notify(heir.bell, split_part(heir.ring, ' ', 1) || ' ' || fence)::text;
      ours := true;
      RETURN;
    END IF;
  END IF;
  ours := @free(ns, nm, own, '');
END $$;

CREATE OR REPLACE FUNCTION @exchange(
  ns text, nm text, old text, own text, md text, wt integer, lim integer, ttl float8, lbl text,
  chan text, rng text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  ours boolean := @free(ns, nm, old, own);
  freed text := current_setting('synchronous_commit');
  answer text := @attempt(ns, nm, own, md, wt, lim, ttl, lbl, chan, rng, true);
BEGIN
  IF freed <> 'off' AND current_setting('synchronous_commit') = 'off' THEN
    PERFORM set_config('synchronous_commit', freed, true);  -- no grant follows
  END IF;
  RETURN ours::integer || ' ' || answer;
END $$;

-- Gives the hold with this owner and token to another owner, with a new token. Returns as `attempt`
-- does, or '' if there is no such hold. An owner that has it already gets the same grant again.
CREATE OR REPLACE FUNCTION @take_over(
  ns text, nm text, old text, fence bigint, own text, ttl float8, lbl text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  r @lock;
  h @holder;
  moment timestamptz;
BEGIN
  PERFORM @durable(true);
  SELECT * INTO r FROM @lock l WHERE l.namespace = ns AND l.name = nm FOR UPDATE;
  moment := clock_timestamp();
  FOR i IN 1 .. coalesce(cardinality(r.holders), 0) LOOP
    h := r.holders[i];
    CONTINUE WHEN (h.ends > moment AND (h.owner = own OR h.owner = old AND h.token = fence))
      IS NOT TRUE;
    IF h.owner = old THEN
      h.owner := own;
      h.token := greatest(r.token + 1, (extract(epoch FROM moment) * 1000000)::bigint);
      h.since := moment;
      h.label := lbl;
      r.token := h.token;
    END IF;
    h.ends := greatest(h.ends, moment + make_interval(secs => ttl));
    UPDATE @lock l SET token = r.token, holders[i] = h, used = moment
      WHERE l.namespace = ns AND l.name = nm;
    RETURN 'G ' || h.token || ' ' || coalesce(array_to_string(h.slots, ','), '');
  END LOOP;
  RETURN '';
END $$;

CREATE OR REPLACE FUNCTION @abandon(ns text, nm text, own text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  r @lock;
BEGIN
  SELECT * INTO r FROM @lock l WHERE l.namespace = ns AND l.name = nm FOR UPDATE;
  IF FOUND THEN
    DELETE FROM @waiter q WHERE q.owner = own;
    PERFORM @free(ns, nm, own, '');
  END IF;
END $$;
"""

_RENEW = """
-- Rows are locked in the order of their names: two clients that renew the same ones can't deadlock.
-- A later end is kept, unless the fourth value of a hold says that it is to be shortened: this call
-- may be late and run after newer ones.
CREATE OR REPLACE FUNCTION @renew(ns text, held json, waiting json) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  item record;
  hs @holder[];
  lost integer[];
  forgotten integer[];
  found_it boolean;
BEGIN
  PERFORM @durable(json_array_length(held) > 0);
  FOR item IN SELECT i::integer, e ->> 0 AS nm, e ->> 1 AS own,
                make_interval(secs => (e ->> 2)::float8) AS ttl,
                coalesce((e ->> 3)::boolean, false) AS shorten
              FROM json_array_elements(held) WITH ORDINALITY AS t (e, i)
              ORDER BY (e ->> 0) COLLATE "C" LOOP
    UPDATE @lock l SET holders[1].ends = greatest(clock_timestamp() + item.ttl,
        CASE WHEN NOT item.shorten THEN (l.holders[1]).ends END)
      WHERE l.namespace = ns AND l.name = item.nm AND (l.holders[1]).owner = item.own
        AND (l.holders[1]).ends > clock_timestamp();
    CONTINUE WHEN FOUND;
    SELECT l.holders INTO hs FROM @lock l WHERE l.namespace = ns AND l.name = item.nm FOR UPDATE;
    found_it := false;
    FOR i IN 1 .. coalesce(cardinality(hs), 0) LOOP
      IF (hs[i]).owner = item.own AND (hs[i]).ends > clock_timestamp() THEN
        found_it := true;
        UPDATE @lock l SET holders[i].ends = greatest(clock_timestamp() + item.ttl,
            CASE WHEN NOT item.shorten THEN (hs[i]).ends END)
          WHERE l.namespace = ns AND l.name = item.nm;
      END IF;
    END LOOP;
    IF NOT found_it THEN
      lost := lost || item.i;
    END IF;
  END LOOP;
  -- An entry that another transaction is changing is skipped, so this can't deadlock.
  WITH mine AS (
    SELECT q.owner, (e ->> 1)::integer AS behind
    FROM json_array_elements(waiting) e JOIN @waiter q ON q.owner = e ->> 0
    FOR UPDATE OF q SKIP LOCKED)
  UPDATE @waiter q SET refreshed = clock_timestamp(), behind = mine.behind
    FROM mine WHERE q.owner = mine.owner;
  SELECT array_agg(i) INTO forgotten
    FROM json_array_elements(waiting) WITH ORDINALITY AS t (e, i)
    WHERE NOT EXISTS (SELECT FROM @waiter q WHERE q.owner = e ->> 0
      AND (q.reserved IS NULL OR q.reserved >= clock_timestamp()));
  RETURN coalesce(array_to_string(lost, ','), '') || ';'
      || coalesce(array_to_string(forgotten, ','), '');
END $$;
"""

_REVOKE = """
CREATE OR REPLACE FUNCTION @revoke(ns text, nm text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  r @lock;
  moment timestamptz;
  tokens bigint[];
BEGIN
  PERFORM @durable(true);
  SELECT * INTO r FROM @lock l WHERE l.namespace = ns AND l.name = nm FOR UPDATE;
  IF NOT FOUND THEN
    RETURN '';
  END IF;
  moment := clock_timestamp();
  tokens := ARRAY(SELECT o.token FROM unnest(r.holders) o WHERE o.ends > moment);
  r.holders := '{}';
  r := @tidy(r, '', moment);
  UPDATE @lock l SET holders = '{}', crowded = r.crowded, used = moment
    WHERE l.namespace = ns AND l.name = nm;
  RETURN array_to_string(tokens, ',');
END $$;

CREATE OR REPLACE FUNCTION @record(
  ns text, nm text, own text, val text, fence bigint, keep float8) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  moment timestamptz;
BEGIN
  PERFORM @durable(true);
  PERFORM FROM @lock l WHERE l.namespace = ns AND l.name = nm AND EXISTS (
    SELECT FROM unnest(l.holders) o WHERE o.owner = own AND o.ends > clock_timestamp())
    FOR UPDATE;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  PERFORM @keep_record(ns, nm, val, fence, keep);
  RETURN true;
END $$;
"""

_PURGE = """
-- A bounded step through the names, in order: returns where to continue, or null at the end. If
-- ``after`` is null it starts at the stored position, and stores the new one. A lock row that is
-- locked by another transaction is skipped: a purge that waited could be part of a deadlock. A row
-- whose token is above the clock stays: the next token must be higher.
CREATE OR REPLACE FUNCTION @purge(ns text, after text, batch integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  moment timestamptz := clock_timestamp();
  start text := coalesce(after, @purged_to(ns, 'lock'));
  seen text;
  steps integer := 0;
  l record;
BEGIN
  PERFORM @durable(false);
  FOR l IN SELECT p.name, p.used FROM @lock p WHERE p.namespace = ns AND p.name > start
           ORDER BY p.name LIMIT batch LOOP
    seen := l.name;
    steps := steps + 1;
    CONTINUE WHEN l.used >= moment - interval '%idle% s';
    PERFORM FROM @lock d WHERE d.namespace = ns AND d.name = l.name
      AND d.used < moment - interval '%idle% s'
      AND d.token < extract(epoch FROM moment) * 1000000
      AND NOT EXISTS (SELECT FROM unnest(d.holders) o WHERE o.ends > moment)
      FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND;
    DELETE FROM @waiter q WHERE q.namespace = ns AND q.name = l.name
      AND q.refreshed < moment - interval '1 hour';
    DELETE FROM @lock d WHERE d.namespace = ns AND d.name = l.name
      AND NOT EXISTS (SELECT FROM @waiter q WHERE q.namespace = ns AND q.name = l.name);
  END LOOP;
  PERFORM @purge_records(ns, batch);
  seen := CASE WHEN steps = batch THEN seen END;
  IF after IS NULL AND start <> coalesce(seen, '') THEN
    PERFORM @keep_record(ns, %position% || 'lock', coalesce(seen, ''), 0, 3e9);
  END IF;
  RETURN seen;
END $$;
"""

LEASE_KEEPING = _RELEASE + _RENEW + _REVOKE + _PURGE

LEASE_LOOK = """
CREATE OR REPLACE FUNCTION @look(ns text, nm text)
RETURNS TABLE (name text, capacity integer, holders json, waiters json) LANGUAGE sql AS $$
  SELECT l.name, l.capacity,
    (SELECT json_agg(json_build_array(o.label, o.mode, o.token, o.slots,
        extract(epoch FROM o.since),
        extract(epoch FROM o.ends) - extract(epoch FROM clock_timestamp())))
      FROM unnest(l.holders) o WHERE o.ends > clock_timestamp()),
    (SELECT json_agg(json_build_array(q.label, q.mode, extract(epoch FROM q.since), q.behind)
        ORDER BY q.place)
      FROM @waiter q WHERE l.crowded AND q.namespace = l.namespace AND q.name = l.name
        AND (q.reserved IS NULL OR q.reserved >= clock_timestamp())
        AND q.refreshed >= clock_timestamp() - interval '%stale% s')
  FROM @lock l WHERE l.namespace = ns AND l.name = nm;
$$;

CREATE OR REPLACE FUNCTION @survey(ns text, pre text, after text, most integer)
RETURNS TABLE (name text, capacity integer, holders json, waiters json) LANGUAGE sql AS $$
  SELECT s.* FROM (SELECT l.name FROM @lock l WHERE l.namespace = ns AND l.name >= pre
      AND l.name > after AND l.name <= pre || repeat(chr(%highest%), 4)
      AND starts_with(l.name, pre) ORDER BY l.name LIMIT most) l, @look(ns, l.name) s
  ORDER BY l.name;
$$;
"""
