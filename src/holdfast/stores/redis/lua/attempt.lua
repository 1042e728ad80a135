-- The rules of `attempt`: the same grant again, a new grant, or an entry in the queue.
-- Returns the token, or {'slots', token, slot…}, or {'busy', position, retry ms, joined, barred
-- until, last token}, or {'limit', in use}, or {'gone'} for a request that was abandoned before it
-- arrived.
local function earliest()
  local moment = soonest_reservation
  if x and (not moment or ends < moment) then moment = ends end
  if n > 0 and (not moment or soonest_end < moment) then moment = soonest_end end
  return moment and math.max(0, moment - now) + 1 or -1
end

-- How many waiters are before a queue number; an upper bound if counting would be expensive.
local function position_of(number)
  if number - first > PORTION then return math.min(number - first, waiting - 1) end
  local count = 0
  for _, owner in ipairs(numbered('l:', first, number - 1)) do
    if owner then count = count + 1 end
  end
  return count
end

local function join_queue(c, mine)
  if mine then
    local number, _, _, _, _, behind, since = read_wait(c.owner)
    write_wait(c.owner, number, c.mode, c.weight, now, 0, behind, since, c.direct_ms, c.channel,
      c.label)
    return position_of(tonumber(number)), 1
  end
  local position = waiting
  if not c.join then return position, 0 end
  if waiting >= QUEUE then return position, 2 end
  last = last + 1
  if waiting == 0 then first = last end
  waiting = waiting + 1
  set('v', VERSION, 'k', limit, 'q', last, 'l:' .. whole(last), c.owner)
  write_wait(c.owner, whole(last), c.mode, c.weight, now, 0, '0',
    whole(time[1] * 1000000 + time[2]), c.direct_ms, c.channel, c.label)
  keep(0)
  return position, 1
end

local function busy(c, mine, retry, barred)
  local position, joined = join_queue(c, mine)
  return {'busy', position, retry or earliest(), joined, barred or 0, token}
end

local function pick_slots(owner, weight)
  local taken = {}
  for _ = 1, weight do
    local at = string.find(slots, '0', 1, true) or #slots + 1
    slots = string.sub(slots, 1, at - 1) .. '1' .. string.sub(slots, at + 1)
    set('s:' .. at - 1, owner)
    taken[#taken + 1] = at - 1
  end
  return taken
end

local function grant(c, mine)
  if mine then leave_queue(c.owner) end
  token = next_token(token, time[1] * 1000000 + time[2])
  set('v', VERSION, 't', token, 'k', limit)
  keep(c.ttl)
  if c.mode == 'x' then
    set('x', c.owner, 'xe', now + c.ttl, 'xl', c.label)
    return token
  end
  local taken = pick_slots(c.owner, c.weight)
  write_hold(c.owner, c.mode, c.weight, now + c.ttl, token, table.concat(taken, ','), c.label)
  n = n + c.weight
  if c.mode == 's' then return token end
  table.insert(taken, 1, token)
  table.insert(taken, 1, 'slots')
  return taken
end

-- Takes the key of redis-py's Lock, or returns after how many ms to try again if such a Lock holds
-- it. redis-py publishes no wake-up, so its holds are polled.
local function held_by_redis_py(c)
  local left = foreign_owner() and call('PTTL', KEYS[2])
  if not left or foreign == c.owner then
    if not left or left < c.ttl then foreign, foreign_ttl = c.owner, c.ttl end
    return nil
  end
  return left >= 0 and math.min(left + 1, FOREIGN) or FOREIGN
end

-- A retry whose first reply was lost gets the same grant again, with its ttl renewed; unless the key
-- of redis-py's Lock has another owner by now. The retry may arrive late, after a renewal with a later
-- end: the later end stays.
local function granted_before(c)
  if x == c.owner then
    if INTEROP and held_by_redis_py(c) then
      drop(c.owner)
      return nil
    end
    set('xe', math.max(ends, now + c.ttl))
    keep(c.ttl)
    return token
  end
  if n == 0 then return nil end
  local mode, weight, its_end, its_token, its_slots, label = read_hold(c.owner)
  if not mode then return nil end
  write_hold(c.owner, mode, weight, math.max(its_end, now + c.ttl), its_token, its_slots, label)
  keep(c.ttl)
  if mode == 's' then return its_token end
  local answer = {'slots', its_token}
  for slot in string.gmatch(its_slots, '%d+') do answer[#answer + 1] = tonumber(slot) end
  return answer
end

-- Until when nothing is granted: this server may have lost holds whose owners still rely on them.
local function barred_until(max_ttl)
  local mark = server_mark()
  local key = KEYS[#KEYS]
  local seen = call('HMGET', key, 'mark', 'barred')
  if seen[1] ~= mark then
    call('HSET', key, 'mark', mark, 'barred', now + max_ttl)
    return now + max_ttl
  end
  local until_ms = number(seen[2] or '', 'barred')
  return until_ms > now and until_ms or nil
end

local function abandoned(c)
  if not abandons_until or abandons_until <= now then return false end
  local known, mark = get('g') or '', ' ' .. c.owner .. '@'
  local at = string.find(known, mark, 1, true)
  return at and c.sent <= number(string.match(known, '^%d*', at + #mark), 'g')
end

-- Whether a claim that is not exclusive has a reservation: everybody before it fitted beside it then,
-- and nobody has joined before it since. It need not walk the queue: n readers that are woken
-- together would cost n^2.
local function is_reserved(c)
  if c.mode == 'x' then return false end
  local number, _, _, _, reserved = read_wait(c.owner)
  count_holders()
  return number and limit == c.limit and tonumber(reserved) >= now and fits(c.mode, c.weight)
end

local function attempt(c)
  if abandoned(c) then return {'gone'} end
  expire()
  local same = granted_before(c)
  if same then return same end
  local barred = LOSS and barred_until(c.max_ttl)
  local mine = waiting > 0 and get('w:' .. c.owner) and true
  if mine and not barred and is_reserved(c) then return grant(c, mine) end
  local admitted, blocked = admit_waiters(mine and c.owner)
  if x or n > 0 or waiting > (mine and 1 or 0) then
    if limit ~= c.limit then return {'limit', limit} end
  else
    limit = c.limit
    count_holders()
    admitted = mine and fits(c.mode, c.weight)
  end
  if not mine then admitted = not blocked and fits(c.mode, c.weight) end
  if barred then return busy(c, mine, barred - now + 1, barred) end
  if not admitted then return busy(c, mine) end
  local foreign = INTEROP and held_by_redis_py(c)
  if foreign then return busy(c, mine, foreign) end
  return grant(c, mine)
end

local function claim(at)
  local mode, weight, want, join, max_ttl, direct_ms, channel =
    string.match(ARGV[at + 4], '^(%a) (%d+) (%d+) (%d) (%d+) (%d+) (%S+)$')
  return {
    owner = ARGV[at], label = ARGV[at + 1], sent = tonumber(ARGV[at + 2]),
    ttl = tonumber(ARGV[at + 3]), mode = mode, weight = tonumber(weight), limit = want,
    join = join == '1', max_ttl = tonumber(max_ttl), direct_ms = direct_ms,
    channel = channel,
  }
end
