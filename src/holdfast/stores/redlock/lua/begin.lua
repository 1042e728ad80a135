-- Marks the data of this node as complete. KEYS[1]: the mark of loss protection. Returns the mark.
local mark = server_mark()
redis.call('HSET', KEYS[1], 'mark', mark, 'marked', 0)
return mark
