-- Reads who holds and who waits, and changes nothing. Both lists are cut at ARGV[1].
-- Answers limit, now ms, holders as {mode, token, end ms, slots, label}…,
-- waiters as {mode, behind, since µs, label}….
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local last = ARGV[1] - 1
local s = call('HMGET', KEYS[1], 'v', 'x', 'xe', 'xl', 't', 'k', 'n', 'w')
if s[1] and s[1] ~= VERSION then return {'incompatible', s[1]} end
local holders, waiters = {}, {}
if s[2] and tonumber(s[3]) > now then
  holders[1] = {'x', s[5], s[3], '-', s[4]}
end
local function details(prefix, owners)
  local fields = {}
  for i, owner in ipairs(owners) do fields[i] = prefix .. owner end
  return #fields > 0 and call('HMGET', KEYS[1], unpack(fields)) or {}
end
if s[7] then
  local rows = call('ZRANGEBYSCORE', KEYS[3], '(' .. string.format('%.0f', now), '+inf',
    'WITHSCORES', 'LIMIT', 0, last + 1)
  local owners, ends = {}, {}
  for i = 1, #rows, 2 do
    owners[#owners + 1], ends[#ends + 1] = rows[i], rows[i + 1]
  end
  for i, entry in ipairs(details('h:', owners)) do
    if entry then
      local mode, _, token, slots, label = string.match(entry, '^(%a) (%d+) (%d+) (%S+) (.*)$')
      holders[#holders + 1] = {mode, token, ends[i], slots, label}
    end
  end
end
if s[8] then
  for _, entry in ipairs(details('w:', call('ZRANGE', KEYS[2], 0, last))) do
    if entry then
      local mode, _, refreshed, reserved, behind, since, _, label =
        string.match(entry, '^(%a) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
      if refreshed + STALE >= now and (reserved == '0' or tonumber(reserved) >= now) then
        waiters[#waiters + 1] = {mode, behind, since, label}
      end
    end
  end
end
return {s[6] or '0', now, holders, waiters}
