-- By what a server knows whether its data may have lost something: this process.
local function server_mark()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
end
