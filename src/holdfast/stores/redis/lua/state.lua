-- The stored state of a name, and the rules: what expires, what fits, which waiters are woken.
-- A name is one hash and nothing else, so a cluster moves it in one piece. These field names are
-- stored and must not change:
--   v protocol version   t last token   k limit (0: a lock)   e when the key expires
--   x xe xl              the exclusive holder: owner, end, label
--   h:OWNER s:NUMBER     shared and slot holders; the owner of a slot (a reader takes one)
--   n b f                their total weight, the slots as text of 0 and 1, a lower bound of their ends
--   w:OWNER l:NUMBER     entries of the queue; the owner of a queue number
--   w i q                the number of entries, a lower bound of their numbers, the last number
--   j:NUMBER             a gap of two or more unused numbers: at its first number the last, and back
--   d g                  until when abandoned owners are remembered, and which
--   rv rt ra re          the record: value, token, time of writing, its end
-- Times are in ms, tokens in µs: both are exact in a Lua number, and redis.call writes all digits.
local state = KEYS[1]
local s = call('HMGET', state, 'v', 't', 'k', 'x', 'xe', 'n', 'b', 'f', 'w', 'i', 'q', 'd', 'e')
if s[1] and s[1] ~= VERSION then
  return {'incompatible', string.sub(s[1], 1, 20)}
end

local function stored_number(at, what, default)
  return s[at] and number(s[at], what) or default
end

local function whole(value)
  return string.format('%.0f', value)
end

local token, limit = stored_number(2, 't', 0), whole(stored_number(3, 'k', 0))
local x, ends = s[4], stored_number(5, 'xe', 0)
local n, slots, soonest_end = stored_number(6, 'n', 0), s[7] or '', stored_number(8, 'f', 0)
local waiting, first, last = stored_number(9, 'w', 0), stored_number(10, 'i', 1), stored_number(11, 'q', 0)
local abandons_until, keeps_until = stored_number(12, 'd', nil), stored_number(13, 'e', nil)
if #slots > MOST_SLOTS or select(2, string.gsub(slots, '1', '')) ~= n or string.find(slots, '[^01]') then
  damaged('b is not the slots that n counts')
end

-- Changes are collected here, and `finish` writes them at the end: a script that fails, or whose
-- writes the server refuses (too few replicas, a failed save, no memory), has changed nothing.
-- Wake-ups are published after the writes.
local changes = {}  -- the new text of a field, or false if the field is deleted
local expires_in
local messages = {}

local function set(...)
  local words = {...}
  for at = 1, #words, 2 do
    local value = words[at + 1]
    changes[words[at]] = type(value) == 'number' and whole(value) or value
  end
end

local function unset(...)
  for _, field in ipairs({...}) do changes[field] = false end
end

local function get(field)
  local value = changes[field]
  if value == nil then return call('HGET', state, field) end
  return value
end

-- Keeps the key longer than its holds; the key of an unused name expires.
local function keep(ttl)
  local until_ms = now + math.max(ttl, KEEP)
  if not keeps_until or until_ms > keeps_until then
    keeps_until = until_ms + DAY
    set('e', keeps_until)
    expires_in = keeps_until - now
  end
end

-- The key of redis-py's Lock, with `interop`: its owner and, if that changes, its new ttl, or 0 to
-- delete it. Read at first use, and written by `finish` like all other changes.
local foreign, foreign_ttl
local function foreign_owner()
  if foreign == nil then foreign = call('GET', KEYS[2]) end
  return foreign
end

local function write_foreign()
  if foreign_ttl == 0 then
    call('DEL', KEYS[2])
  elseif foreign_ttl then
    call('SET', KEYS[2], foreign, 'PX', foreign_ttl)
  end
end

local function write(command, words)
  for from = 1, #words, 2 * PORTION do
    call(command, state, unpack(words, from, math.min(from + 2 * PORTION - 1, #words)))
  end
end

local stored = {n = n, slots = slots, soonest_end = soonest_end, waiting = waiting, first = first}
local function note_counts()
  if n ~= stored.n or slots ~= stored.slots or soonest_end ~= stored.soonest_end then
    if n > 0 then set('n', n, 'b', slots, 'f', soonest_end) else unset('n', 'b', 'f') end
  end
  if waiting ~= stored.waiting or first ~= stored.first then
    if waiting > 0 then set('w', waiting, 'i', first) else unset('w', 'i') end
  end
end

-- Writes all changes, then publishes the wake-ups, and returns the reply. If this user may not publish,
-- the waiters attempt again by themselves.
local function finish(reply)
  note_counts()
  local gone, fields = {}, {}
  for field, value in pairs(changes) do
    if value then
      fields[#fields + 1] = field
      fields[#fields + 1] = value
    else
      gone[#gone + 1] = field
    end
  end
  write_foreign()
  write('HDEL', gone)  -- first: a server without free memory still allows deletes
  write('HSET', fields)
  if expires_in then call('PEXPIRE', state, expires_in) end
  for _, message in ipairs(messages) do redis.pcall('PUBLISH', message[1], message[2]) end
  return reply
end

-- Reads a range of numbered fields; at most PORTION, as Lua's stack is limited.
local function numbered(prefix, from, to)
  local fields = {}
  for at = from, to do fields[#fields + 1] = prefix .. whole(at) end
  if #fields == 0 then return fields end
  local values = call('HMGET', state, unpack(fields))
  for at, field in ipairs(fields) do
    if changes[field] ~= nil then values[at] = changes[field] end
  end
  return values
end

local function read_hold(owner)
  local entry = get('h:' .. owner)
  if not entry then return nil end
  local mode, weight, its_end, its_token, its_slots, label =
    string.match(entry, '^([sn]) (%d+) (%d+) (%d+) ([%d,]+) (.*)$')
  if not mode then damaged('the entry of a hold') end
  local count = 0
  for slot in string.gmatch(its_slots, '%d+') do
    if string.sub(slots, slot + 1, slot + 1) ~= '1' then damaged('the slots of a hold') end
    count = count + 1
  end
  if number(weight, 'a weight') ~= count then damaged('the weight of a hold') end
  return mode, count, number(its_end, 'an end'), number(its_token, 'a token'), its_slots, label
end

local function write_hold(owner, mode, weight, its_end, its_token, its_slots, label)
  set('h:' .. owner, mode .. ' ' .. weight .. ' ' .. whole(its_end) .. ' '
    .. whole(its_token) .. ' ' .. its_slots .. ' ' .. label)
  if soonest_end == 0 or its_end < soonest_end then soonest_end = its_end end
end

-- Ends a hold and returns its token, or nil if there is none.
local function drop(owner)
  if INTEROP and foreign_owner() == owner then foreign, foreign_ttl = false, 0 end
  if x == owner then
    x = false
    unset('x', 'xe', 'xl')
    return ends > now and token or nil
  end
  if n == 0 then return nil end
  local mode, weight, _, its_token, its_slots = read_hold(owner)
  if not mode then return nil end
  unset('h:' .. owner)
  for slot in string.gmatch(its_slots, '%d+') do
    unset('s:' .. slot)
    slots = string.sub(slots, 1, slot) .. '0' .. string.sub(slots, slot + 2)
  end
  n = n - weight
  if n < 0 then damaged('the weights of the holds') end
  if n == 0 then slots, soonest_end = '', 0 end
  return its_token
end

-- The owners of all taken slots, each once; no more than `most`, if that is given.
local function holders(most)
  local owners, seen = {}, {}
  for from = 0, #slots - 1, PORTION do
    for at, owner in ipairs(numbered('s:', from, math.min(from + PORTION, #slots) - 1)) do
      local taken = string.sub(slots, from + at, from + at) == '1'
      if taken ~= (owner and true) then damaged('who has a slot') end
      if owner and not seen[owner] then
        if not get('h:' .. owner) then damaged('a slot without a hold') end
        seen[owner] = true
        owners[#owners + 1] = owner
        if #owners == most then return owners end
      end
    end
  end
  return owners
end

local function expire()
  if x and ends <= now then drop(x) end
  if n == 0 or soonest_end > now then return end
  local soonest = 0
  for _, owner in ipairs(holders()) do
    local _, _, its_end = read_hold(owner)
    if its_end <= now then
      drop(owner)
    elseif soonest == 0 or its_end < soonest then
      soonest = its_end
    end
  end
  soonest_end = soonest
end

local function read_wait(owner)
  local entry = get('w:' .. owner)
  if not entry then return nil end
  local read = {string.match(entry,
    '^(%d+) ([xsn]) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')}
  if not read[1] then damaged('the entry of one in line') end
  for at = 1, 8 do
    if at ~= 2 then number(read[at], 'a number of one in line') end
  end
  return unpack(read)
end

local function write_wait(owner, number, mode, weight, refreshed, reserved, behind, since, direct_ms,
    channel, label)
  set('w:' .. owner, number .. ' ' .. mode .. ' ' .. weight .. ' '
    .. whole(refreshed) .. ' ' .. whole(reserved) .. ' ' .. behind .. ' ' .. since .. ' '
    .. direct_ms .. ' ' .. channel .. ' ' .. label)
end

-- The other end of a gap in the queue, from its first or last number.
local function gap_end(at)
  local other = get('j:' .. whole(at))
  if not other then return at end
  other = number(other, 'j')
  if other < first or other > last then damaged('a gap in the line') end
  return other
end

-- Joins the unused number `at` with the gap that ends at, or starts at, its neighbour.
local function join_gap(at, neighbour)
  if neighbour < first or neighbour > last or get('l:' .. whole(neighbour)) then return at end
  local other = gap_end(neighbour)
  unset('j:' .. whole(neighbour), 'j:' .. whole(other))
  return other
end

-- Removes an entry. Gaps at either end of the queue are cut off, and neighbouring gaps become one:
-- there are never more gaps than entries, however many waiters have given up.
local function leave_queue(owner)
  local text = read_wait(owner)
  if not text then return end
  unset('w:' .. owner, 'l:' .. text)
  waiting = waiting - 1
  local at = tonumber(text)
  local from, to = join_gap(at, at - 1), join_gap(at, at + 1)
  if to == last then
    last = from - 1
    set('q', last)
  elseif from == first then
    first = to + 1
  elseif from < to then
    set('j:' .. whole(from), to, 'j:' .. whole(to), from)
  end
end

-- Calls `visit` for every entry in order, until it returns true. Returns whether it did. The work is
-- bounded by the number of entries. `visit` must not change the queue.
local function walk_queue(visit)
  local from, size, steps = first, 4, 0
  while waiting > 0 and from <= last do
    local owners, at = numbered('l:', from, math.min(from + size - 1, last)), 1
    while at <= #owners do
      steps = steps + 1
      if steps > MOST_STEPS then damaged('the line from i to q is too long') end
      if not owners[at] then
        at = gap_end(from + at - 1) - from + 1
      elseif visit(owners[at]) then
        return true
      end
      at = at + 1
    end
    size = at > #owners + 1 and 4 or math.min(size * 4, PORTION)  -- small again after a long gap
    from = from + at - 1
  end
  return false
end

-- Cuts off a gap before the first entry: the usual cases in `acquire` and `release` may leave one.
local function skip_first_gap()
  if waiting == 0 or first > last or get('l:' .. whole(first)) then return end
  first = join_gap(first, first) + 1
end

-- What is taken by holders, and by the waiters that are admitted before the current one.
local capacity, weights, any_holder, exclusive_holder
local function count_holders()
  capacity, weights = tonumber(limit), n
  any_holder, exclusive_holder = x or n > 0, x
end

local function fits(mode, weight)
  if mode == 'x' then return not any_holder end
  if mode == 's' then return not exclusive_holder end
  return weights + weight <= capacity
end

local function count_as_holder(mode, weight)
  any_holder, weights = true, weights + weight
  if mode == 'x' then exclusive_holder = true end
end

local function full()
  if capacity > 0 then return weights >= capacity end
  return exclusive_holder
end

-- Wakes a waiter, after the writes. Returns false if its client is gone: its channel has no
-- subscriber. A waiter without a channel has not subscribed yet, and attempts again soon.
local function wake(owner, channel)
  if channel == '-' then return true end
  local listening = CLUSTER or listeners(channel) > 0
  if listening then
    messages[#messages + 1] = {channel, string.sub(redis.sha1hex(owner), 1, 16)}
  end
  return listening
end

-- Walks the queue while claims fit: reserves the lock for them, wakes them, and removes waiters that
-- are gone. Returns whether `me` fits at its position, and whether a waiter that does not fit was met.
local soonest_reservation
local function admit_waiters(me)
  local admitted, blocked, at_front, gone = false, false, true, {}
  soonest_reservation = nil
  count_holders()
  if full() then return false, false end
  skip_first_gap()
  local stopped = walk_queue(function(owner)
    local number, mode, weight, refreshed, reserved, behind, since, direct_ms, channel, label =
      read_wait(owner)
    if not number then damaged('a place in line without an entry') end
    reserved = tonumber(reserved)
    local here = owner == me
      or (reserved == 0 or reserved >= now) and refreshed + STALE >= now
    if here and not fits(mode, weight) then
      blocked = true
      return true
    end
    if here and owner == me then
      admitted = true
    elseif here and reserved == 0 then
      reserved = now + GRACE
      here = wake(owner, channel)
      if here then
        write_wait(owner, number, mode, weight, refreshed, reserved, behind, since, direct_ms,
          channel, label)
      end
    end
    if not here then
      gone[#gone + 1] = owner
      return false
    end
    at_front = false
    count_as_holder(mode, weight)
    if owner ~= me and (not soonest_reservation or reserved < soonest_reservation) then
      soonest_reservation = reserved
    end
    return full()
  end)
  for _, owner in ipairs(gone) do leave_queue(owner) end
  if at_front and not stopped then waiting = 0 end
  return admitted, blocked
end
