-- All that is known about a name, and the rules: what runs out, who fits, who is woken.
-- A name is one hash, and nothing else: a cluster moves it in one piece.
--   v protocol version   t last token   k limit (0: a lock)   e when the key runs out
--   x xe xl              the exclusive holder: owner, end, label
--   h:OWNER s:NUMBER     shared and slots holders; who has a slot (readers count as one each)
--   n b f                their weight, the slots as text of 0 and 1, no end is earlier than this
--   w:OWNER l:NUMBER     those in line; who has a number in it
--   w i q                how many they are, no number is lower, the last number
--   d g                  until when abandoned owners are remembered, and which
--   rv rt ra re          the record: value, token, when it was written, its end
-- Times are in ms, tokens in µs: both whole in a Lua number, and redis.call writes them out whole.
local state = KEYS[1]
local s = call('HMGET', state, 'v', 't', 'k', 'x', 'xe', 'n', 'b', 'f', 'w', 'i', 'q', 'd', 'e')
local version, token, limit = s[1], tonumber(s[2]) or 0, s[3] or '0'
local x, ends = s[4], tonumber(s[5]) or 0
local n, slots, soonest_end = tonumber(s[6]) or 0, s[7] or '', tonumber(s[8]) or 0
local waiting, first, last = tonumber(s[9]) or 0, tonumber(s[10]) or 1, tonumber(s[11]) or 0
local abandons_until, keeps_until = tonumber(s[12]), tonumber(s[13])

if version and version ~= VERSION then
  return {'incompatible', version}
end

local function whole(number)
  return string.format('%.0f', number)
end

-- The key outlives what it holds, and names that nobody uses go in the end. After the first
-- write: a key that is not there yet takes no end.
local function keep(ttl)
  local until_ms = now + math.max(ttl, KEEP)
  if not keeps_until or until_ms > keeps_until then
    keeps_until = until_ms + DAY
    call('HSET', state, 'e', keeps_until)
    call('PEXPIRE', state, keeps_until - now)
  end
end

-- Writes what changed in passing.
local stored = {n = n, slots = slots, soonest_end = soonest_end, waiting = waiting, first = first}
local function save()
  if n ~= stored.n or slots ~= stored.slots or soonest_end ~= stored.soonest_end then
    if n > 0 then
      call('HSET', state, 'n', n, 'b', slots, 'f', soonest_end)
    else
      call('HDEL', state, 'n', 'b', 'f')
    end
  end
  if waiting ~= stored.waiting or first ~= stored.first then
    if waiting > 0 then
      call('HSET', state, 'w', waiting, 'i', first)
    else
      call('HDEL', state, 'w', 'i')
    end
  end
  stored = {n = n, slots = slots, soonest_end = soonest_end, waiting = waiting, first = first}
end

-- Reads many numbered fields, in portions that Lua's stack can take.
local function numbered(prefix, from, to)
  local fields = {}
  for number = from, to do fields[#fields + 1] = prefix .. whole(number) end
  return #fields > 0 and call('HMGET', state, unpack(fields)) or {}
end

local function read_hold(owner)
  local entry = call('HGET', state, 'h:' .. owner)
  if entry then
    local mode, weight, its_end, its_token, its_slots, label =
      string.match(entry, '^(%a) (%d+) (%d+) (%d+) (%S+) (.*)$')
    return mode, tonumber(weight), tonumber(its_end), tonumber(its_token), its_slots, label
  end
end

local function write_hold(owner, mode, weight, its_end, its_token, its_slots, label)
  call('HSET', state, 'h:' .. owner, mode .. ' ' .. weight .. ' ' .. whole(its_end) .. ' '
    .. whole(its_token) .. ' ' .. its_slots .. ' ' .. label)
  if soonest_end == 0 or its_end < soonest_end then soonest_end = its_end end
end

-- Ends a hold and gives its token, or nil if there was none.
local function drop(owner)
  if INTEROP and call('GET', KEYS[2]) == owner then call('DEL', KEYS[2]) end
  if x == owner then
    x = false
    call('HDEL', state, 'x', 'xe', 'xl')
    return ends > now and token or nil
  end
  if n == 0 then return nil end
  local mode, weight, _, its_token, its_slots = read_hold(owner)
  if not mode then return nil end
  call('HDEL', state, 'h:' .. owner)
  for slot in string.gmatch(its_slots, '%d+') do
    call('HDEL', state, 's:' .. slot)
    slots = string.sub(slots, 1, slot) .. '0' .. string.sub(slots, slot + 2)
  end
  n = n - weight
  if n == 0 then slots, soonest_end = '', 0 end
  return its_token
end

-- The owners of all slots that are taken, each once.
local function holders()
  local owners, seen = {}, {}
  for from = 0, #slots - 1, PORTION do
    for _, owner in ipairs(numbered('s:', from, math.min(from + PORTION, #slots) - 1)) do
      if owner and not seen[owner] then
        seen[owner] = true
        owners[#owners + 1] = owner
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
  local entry = call('HGET', state, 'w:' .. owner)
  if entry then
    return string.match(entry, '^(%d+) (%a) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
  end
end

local function write_wait(owner, number, mode, weight, refreshed, reserved, behind, since, handed,
    channel, label)
  call('HSET', state, 'w:' .. owner, number .. ' ' .. mode .. ' ' .. weight .. ' '
    .. whole(refreshed) .. ' ' .. whole(reserved) .. ' ' .. behind .. ' ' .. since .. ' '
    .. handed .. ' ' .. channel .. ' ' .. label)
end

local function leave(owner)
  local number = read_wait(owner)
  if not number then return end
  call('HDEL', state, 'w:' .. owner, 'l:' .. number)
  waiting = waiting - 1
  if tonumber(number) == first then first = first + 1 end
end

-- What holders take, and then those in line: whoever stands in front counts as if it held.
local capacity, weights, anybody, alone
local function count_holders()
  capacity, weights = tonumber(limit), n
  anybody, alone = x or n > 0, x
end

local function fits(mode, weight)
  if mode == 'x' then return not anybody end
  if mode == 's' then return not alone end
  return weights + weight <= capacity
end

local function take(mode, weight)
  anybody, weights = true, weights + weight
  if mode == 'x' then alone = true end
end

local function full()
  if capacity > 0 then return weights >= capacity end
  return alone
end

-- Whether somebody was there to hear it. Waiters that do not listen yet attempt again soon.
local function wake(owner, channel)
  if channel == '-' then return true end
  return call('PUBLISH', channel, string.sub(redis.sha1hex(owner), 1, 16)) > 0 or CLUSTER
end

-- Goes along the line while claims fit: reserves for them, wakes them, skips who is gone.
-- Tells whether `me` fits in its place, and whether somebody who does not fit was met.
local soonest_reservation
local function settle(me)
  local admitted, at_front, size, from = false, true, 4, first
  soonest_reservation = nil
  count_holders()
  while waiting > 0 and from <= last and not full() do
    local owners = numbered('l:', from, math.min(from + size - 1, last))
    for at, owner in ipairs(owners) do
      local here, number, mode, weight, refreshed, reserved, behind, since, handed, channel, label
        = owner
      if here then
        number, mode, weight, refreshed, reserved, behind, since, handed, channel, label =
          read_wait(owner)
        reserved = tonumber(reserved)
        here = owner == me
          or (reserved == 0 or reserved >= now) and refreshed + STALE >= now
      end
      if here and not fits(mode, weight) then return admitted, true end
      if here and owner == me then
        admitted = true
      elseif here and reserved == 0 then
        reserved = now + GRACE
        here = wake(owner, channel)
        if here then
          write_wait(owner, number, mode, weight, refreshed, reserved, behind, since, handed,
            channel, label)
        end
      end
      if here then
        at_front = false
        take(mode, weight)
        if owner ~= me and (not soonest_reservation or reserved < soonest_reservation) then
          soonest_reservation = reserved
        end
        if full() then return admitted, false end
      else
        if owner then leave(owner) end
        if at_front then first = from + at end
      end
    end
    from = from + #owners
    size = math.min(size * 4, PORTION)
  end
  if at_front and from > last then waiting = 0 end
  return admitted, false
end
