-- Marks what is stored here as known to be whole. KEYS[1] is where loss protection keeps its mark.
local run = server_mark()
redis.call('HSET', KEYS[1], 'run', run, 'since', 0)
return run
