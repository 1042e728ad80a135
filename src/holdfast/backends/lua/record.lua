-- Keeps a value if the hold is still its owner's. KEYS[5] is the record.
-- ARGV: owner, value, token, keep ms. Answers 1, or 0 if the hold is gone.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local s = call('HMGET', KEYS[1], 'v', 'x', 'xe')
if s[1] and s[1] ~= VERSION then return {'incompatible', s[1]} end
local ends = s[2] == ARGV[1] and s[3] or call('ZSCORE', KEYS[3], ARGV[1])
if not ends or tonumber(ends) <= now then return 0 end
call('HSET', KEYS[5], 'value', ARGV[2], 'token', ARGV[3], 'at', now)
call('PEXPIRE', KEYS[5], ARGV[4])
return 1
