-- Reads the record. Answers value, token, age ms, or nothing.
local s = redis.call('HMGET', KEYS[1], 'v', 'rv', 'rt', 'ra', 're')
if s[1] and s[1] ~= VERSION then return {'incompatible', s[1]} end
local time = redis.call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not s[2] or tonumber(s[5]) <= now then return false end
return {s[2], s[3], math.max(0, now - s[4])}
