-- Reads a record. KEYS[1] is the record. Answers value, token, age ms, or nothing.
local s = redis.call('HMGET', KEYS[1], 'value', 'token', 'at')
if not s[1] then return false end
local time = redis.call('TIME')
return {s[1], s[2], math.max(0, time[1] * 1000 + (time[2] - time[2] % 1000) / 1000 - s[3])}
