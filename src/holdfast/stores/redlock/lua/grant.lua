-- One node's vote on a claim.
-- KEYS: name, run   ARGV: owner, label, sent µs, ttl ms, proposal,
--   shape: mode, weight, limit, join, max ttl ms, choice of slots (@start, or exactly these)
-- Returns {1, token, slots, free} or {0, counter, retry ms, holder, free, age ms} or {'limit', in use}
-- or {'barred', counter, retry ms, until ms} or {'clock', counter} or {'gone'}.
local owner, label, sent, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local proposal = tonumber(ARGV[5])
local mode, weight, want, join, max_ttl, choice =
  string.match(ARGV[6], '^(%a) (%d+) (%d+) (%d) (%d+) (%S+)$')
local start = string.match(choice, '^@(%d+)$')

-- Returns until when this node grants nothing, because it may have lost holds; nil if it may grant.
local function barred_until()
  local mark = server_mark()
  local seen = call('HMGET', KEYS[2], 'mark', 'marked')
  local since = number(seen[2] or '0', 'marked')
  if seen[1] ~= mark then
    since = now
    call('HSET', KEYS[2], 'mark', mark, 'marked', since)
  end
  local over_at = since + max_ttl
  return over_at > now and over_at or nil
end

local used, map = {}, ''

local function survey_slots()
  for other, hold in pairs(holds) do
    if other ~= owner then
      for slot in string.gmatch(hold.slots, '%d+') do used[tonumber(slot)] = true end
    end
  end
  local marks = {}
  for slot = 0, want - 1 do marks[#marks + 1] = used[slot] and '0' or '1' end
  map = table.concat(marks)
end

local function pick()
  local picked = {}
  if not start then
    for slot in string.gmatch(choice, '%d+') do
      if used[tonumber(slot)] then return nil end
    end
    return choice
  end
  for step = 0, want - 1 do
    local slot = (start + step) % want
    if not used[slot] and #picked < tonumber(weight) then picked[#picked + 1] = slot end
  end
  if #picked < tonumber(weight) then return nil end
  table.sort(picked)
  return table.concat(picked, ',')
end

local function busy()
  local moment, holder, since = 0, '', 0
  if x then
    moment, holder, since = ends, digest(x), tonumber(s[14] or 0)
  else
    for _, hold in pairs(holds) do
      local sooner = moment == 0 or hold.ends < moment
      since = math.max(since, hold.since)
      if mode == 'n' and sooner or mode ~= 'n' and not sooner then moment = hold.ends end
    end
    if mode == 's' then moment = tonumber(s[11] or 0) end
  end
  if mode == 'x' and count > 0 and join == '1' and (not intent or intent == owner) then
    call('HSET', key, 'v', VERSION, 'i', owner, 'ie', now + INTENT)
    keep(0)
  end
  return {0, c, math.max(0, moment - now) + 1, holder, map, now - since}
end

if abandoned(owner, sent) then return {'gone'} end
-- A repeated attempt may arrive late, after requests that set a later expiry: the later one stays.
if x == owner and mode == 'x' then
  call('HSET', key, 'xe', math.max(ends, now + ttl), 'xs', math.max(sent, tonumber(s[13] or 0)))
  keep(ttl)
  return {1, token, '-', ''}
end
local mine = holds[owner]
if mode == 'n' then survey_slots() end
if mine and (start or mode == 's') then
  mine.ends, mine.sent = math.max(mine.ends, now + ttl), math.max(sent, mine.sent)
  write(owner, mine)
  keep(ttl)
  return {1, mine.token, mine.slots, map}
end
-- Refuses a proposal that is more than a day ahead, unless this node's own counter is that far
-- ahead already.
if proposal > math.max(time[1] * 1000000 + time[2] + DAY * 1000, c + 1) then return {'clock', c} end
if (x or count > (mine and 1 or 0)) and limit ~= want then return {'limit', limit} end
local barred = LOSS and barred_until()
if barred then return {'barred', c, barred - now + 1, barred} end

local slots = '-'
if mode == 'x' and (x or count > 0) then return busy() end
if mode == 's' and (x or intent) then return busy() end
if mode == 'n' then
  slots = pick()
  if not slots then
    if mine then drop(owner, 0) end
    return busy()
  end
end
c = next_token(c, proposal)
if mode == 'x' then
  take_alone(owner, now + ttl, c, sent, label)
else
  call('HSET', key, 'v', VERSION, 'c', c, 'k', want)
  take(owner, {mode = mode, ends = now + ttl, token = c, sent = sent, slots = slots,
    label = label})
end
keep(ttl)
return {1, c, slots, map}
