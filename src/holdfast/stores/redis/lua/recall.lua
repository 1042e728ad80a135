-- Reads the record. Returns value, token, age ms; or false if there is none.
local s = redis.call('HMGET', KEYS[1], 'v', 'rv', 'rt', 'ra', 're')
if s[1] and s[1] ~= VERSION then return {'incompatible', s[1]} end
local time = redis.call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not s[2] then return false end
local written, ends = number(s[4] or '', 'ra'), number(s[5] or '', 're')
if ends <= now then return false end
return {s[2], number(s[3] or '', 'rt'), math.max(0, now - written)}
