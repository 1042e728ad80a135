-- By what a server knows whether its data may have lost something: this process, and the replication
-- history that it writes. Both are new after a restart. Every promotion begins a new history: a master
-- that was demoted, and promoted again, may have missed what another one wrote meanwhile.
local function server_mark()
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  return (run or '') .. ':' .. (history or '')
end
