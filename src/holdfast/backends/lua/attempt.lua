-- The rules of `attempt`: the same grant again, a new one, or a place in the line.
-- Answers the token, or {'slots', token, slot…}, or {'busy', place, retry ms, joined, barred until},
-- or {'limit', in use}, or {'gone'} for a request that arrives after its own undoing.
local function earliest()
  local first = soonest
  if x and (not first or ends < first) then first = ends end
  if n > 0 then
    local next_end = tonumber(call('ZRANGE', held, 0, 0, 'WITHSCORES')[2])
    if next_end and (not first or next_end < first) then first = next_end end
  end
  if not first then return -1 end
  return math.max(0, first - now) + 1
end

local function join_line(c, mine)
  local place = mine and call('ZRANK', line, c.owner) or waiting
  if mine then
    local _, _, _, _, behind, since = read_wait(c.owner)
    write_wait(c.owner, c.mode, c.weight, now, 0, behind, since, c.channel, c.label)
    return place, 1
  end
  if not c.join then return place, 0 end
  if waiting >= QUEUE then return place, 2 end
  call('ZADD', line, call('HINCRBY', state, 'q', 1), c.owner)
  call('PEXPIRE', line, KEEP + DAY)
  write_wait(c.owner, c.mode, c.weight, now, 0, '0', whole(time[1] * 1000000 + time[2]),
    c.channel, c.label)
  waiting = waiting + 1
  call('HSET', state, 'v', VERSION, 'k', limit, 'e', keep(0))
  return place, 1
end

local function busy(c, mine, retry, barred)
  local place, joined = join_line(c, mine)
  save()
  return {'busy', place, retry or earliest(), joined, barred or 0}
end

local function pick_slots(weight)
  local taken = {}
  for _ = 1, weight do
    local at = string.find(slots, '0', 1, true) or #slots + 1
    slots = string.sub(slots, 1, at - 1) .. '1' .. string.sub(slots, at + 1)
    taken[#taken + 1] = at - 1
  end
  return taken
end

local function grant(c, mine)
  if mine then leave(c.owner) end
  token = math.max(token + 1, time[1] * 1000000 + time[2])
  call('HSET', state, 'v', VERSION, 't', token, 'k', limit, 'e', keep(c.ttl))
  if c.mode == 'x' then
    call('HSET', state, 'x', c.owner, 'xe', now + c.ttl, 'xl', c.label)
    save()
    return token
  end
  local taken = c.mode == 'n' and pick_slots(c.weight) or {}
  local text = #taken > 0 and table.concat(taken, ',') or '-'
  call('HSET', state, 'h:' .. c.owner,
    c.mode .. ' ' .. c.weight .. ' ' .. whole(token) .. ' ' .. text .. ' ' .. c.label)
  call('ZADD', held, now + c.ttl, c.owner)
  call('PEXPIRE', held, math.max(c.ttl, KEEP) + DAY)
  n = n + c.weight
  save()
  if c.mode == 's' then return token end
  table.insert(taken, 1, token)
  table.insert(taken, 1, 'slots')
  return taken
end

-- A retry whose first answer was lost gets the same grant again, with its ttl renewed.
local function again(c)
  if x == c.owner then
    call('HSET', state, 'xe', now + c.ttl, 'e', keep(c.ttl))
    if INTEROP then call('PEXPIRE', KEYS[5], c.ttl) end
    return token
  end
  local mode, its_token, taken, _
  if n > 0 then mode, _, its_token, taken = read_hold(c.owner) end
  if not mode then return nil end
  call('ZADD', held, now + c.ttl, c.owner)
  call('HSET', state, 'e', keep(c.ttl))
  if mode == 's' then return tonumber(its_token) end
  local answer = {'slots', tonumber(its_token)}
  for slot in string.gmatch(taken, '%d+') do answer[#answer + 1] = tonumber(slot) end
  return answer
end

-- Until when nothing is granted: this server may have lost holds that their owners believe in.
local function barred_until(max_ttl)
  local run = string.match(call('INFO', 'server'), 'run_id:(%x+)')
  local key = KEYS[#KEYS]
  local seen = call('HMGET', key, 'run', 'until')
  if seen[1] ~= run then
    call('HSET', key, 'run', run, 'until', now + max_ttl)
    return now + max_ttl
  end
  return tonumber(seen[2]) > now and tonumber(seen[2]) or nil
end

-- What redis-py's Lock sees. It wakes nobody, so its holds are looked at again soon.
local function taken_elsewhere(c)
  if call('SET', KEYS[5], c.owner, 'NX', 'PX', c.ttl) then return nil end
  if call('GET', KEYS[5]) == c.owner then
    call('PEXPIRE', KEYS[5], c.ttl)
    return nil
  end
  local left = call('PTTL', KEYS[5])
  return left >= 0 and math.min(left + 1, FOREIGN) or FOREIGN
end

local function attempt(c)
  if s[9] and tonumber(s[9]) > now then
    local abandoned = call('ZSCORE', gone, c.owner)
    if abandoned and c.sent <= tonumber(abandoned) then return {'gone'} end
  end
  expire()
  local same = again(c)
  if same then
    save()
    return same
  end
  local barred = LOSS and barred_until(c.max_ttl)
  local mine = waiting > 0 and call('ZSCORE', line, c.owner)
  local admitted, blocked = settle(mine and c.owner, c.mode, c.weight)
  if x or n > 0 or waiting > (mine and 1 or 0) then
    if limit ~= c.limit then
      save()
      return {'limit', limit}
    end
  else
    limit = c.limit
    count_holders()
    admitted = mine and fits(c.mode, c.weight)
  end
  if not mine then admitted = not blocked and fits(c.mode, c.weight) end
  if barred then return busy(c, mine, barred - now + 1, barred) end
  if not admitted then return busy(c, mine) end
  local foreign = INTEROP and taken_elsewhere(c)
  if foreign then return busy(c, mine, foreign) end
  return grant(c, mine)
end

local function claim(at)
  local mode, weight, want, join, max_ttl, channel =
    string.match(ARGV[at + 4], '^(%a) (%d+) (%d+) (%d) (%d+) (%S+)$')
  return {
    owner = ARGV[at], label = ARGV[at + 1], sent = tonumber(ARGV[at + 2]),
    ttl = tonumber(ARGV[at + 3]), mode = mode, weight = tonumber(weight), limit = want,
    join = join == '1', max_ttl = tonumber(max_ttl), channel = channel,
  }
end
