-- Marks the data of this server as complete. KEYS[1] is the key of loss protection.
local mark = server_mark()
redis.call('HSET', KEYS[1], 'mark', mark, 'barred', 0)
return mark
