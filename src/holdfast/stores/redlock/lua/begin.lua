-- Marks what is stored here as known to be whole. KEYS[1] is where loss protection keeps its mark.
local mark = server_mark()
redis.call('HSET', KEYS[1], 'mark', mark, 'marked', 0)
return mark
