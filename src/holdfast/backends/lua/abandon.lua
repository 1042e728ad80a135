-- Leaves no trace of an owner, and remembers it for a while: an attempt of its that was sent
-- before and arrives after this one finds nothing to take. ARGV: owner, sent µs.
-- Answers 1 if it held.
expire()
local was = drop(ARGV[1])
leave(ARGV[1])
call('ZREMRANGEBYSCORE', gone, '-inf', time[1] * 1000000 + time[2] - REMEMBER * 1000)
call('ZADD', gone, ARGV[2], ARGV[1])
call('PEXPIRE', gone, REMEMBER)
call('HSET', state, 'v', VERSION, 'd', now + REMEMBER, 'e', keep(0))
settle()
save()
return was and 1 or 0
