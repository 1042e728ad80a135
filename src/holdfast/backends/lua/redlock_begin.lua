-- Marks what is stored here as known to be whole. KEYS[1] is where loss protection keeps its mark.
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
redis.call('HSET', KEYS[1], 'run', run, 'since', 0)
return run
