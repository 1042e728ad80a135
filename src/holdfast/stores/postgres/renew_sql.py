"""The server's side of lease rows: how a hold is kept and ended. See ``postgres_lease_sql``."""

from __future__ import annotations

__all__ = ["LEASE_KEEPING"]

_RELEASE = """
-- `heir` is not rung: it is asked for in the same breath.
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
    IF next_one.mode = 'exclusive' THEN  -- the usual way: one goes and one comes
      -- Whose grant will be on disk and all before it: no need to wait twice.
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
  -- Nothing of ours has ended, or somebody comes for it: here, too, there is nothing to wait for.
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

-- A release. The first in line, if it can be told so, is granted as it is woken: for a part of its
-- ttl, since nobody knows whether it is still well. It asks for more, or for the same once more.
-- `ours` comes in true from one who has waited, and may leave others behind. Asked for the empty
-- name, which nobody has, it plans all that and does nothing.
-- First the grant is on disk, then it is told. Not in one commit: one that notifies keeps others
-- that do so waiting, in the whole database, and would keep them waiting for the disk.
-- What commits can't have a search_path of its own (SET): it sets one for each transaction, and
-- nothing is looked up before.
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
    PERFORM set_config('synchronous_commit', freed, true);  -- no grant brings the release along
  END IF;
  RETURN ours::integer || ' ' || answer;
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
-- An end that is later stays, unless the fourth word of a hold says that it is to be shortened:
-- this may be done long after later ones.
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
  -- An entry that somebody is just waking or skipping is left alone, so this can't deadlock.
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
-- A bounded step through the names, in order: answers where to go on, or null at the end.
CREATE OR REPLACE FUNCTION @purge(ns text, after text, batch integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  moment timestamptz := clock_timestamp();
  seen text;
  steps integer := 0;
  l record;
BEGIN
  PERFORM @durable(false);
  FOR l IN SELECT p.name, p.used FROM @lock p WHERE p.namespace = ns AND p.name > after
           ORDER BY p.name LIMIT batch LOOP
    seen := l.name;
    steps := steps + 1;
    IF l.used < moment - interval '%idle% s' THEN
      DELETE FROM @waiter q WHERE q.namespace = ns AND q.name = l.name
        AND q.refreshed < moment - interval '1 hour';
      DELETE FROM @lock d WHERE d.namespace = ns AND d.name = l.name
        AND d.used < moment - interval '%idle% s'
        AND NOT EXISTS (SELECT FROM unnest(d.holders) o WHERE o.ends > moment)
        AND NOT EXISTS (SELECT FROM @waiter q WHERE q.namespace = ns AND q.name = l.name);
    END IF;
  END LOOP;
  PERFORM @purge_records(ns, batch);
  RETURN CASE WHEN steps = batch THEN seen END;
END $$;
"""

LEASE_KEEPING = _RELEASE + _RENEW + _REVOKE + _PURGE
