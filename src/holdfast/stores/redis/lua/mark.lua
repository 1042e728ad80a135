-- By what a server knows whether its data may have lost something: this process, and the replication
-- history that it writes. Both are new after a restart. Every promotion begins a new history: a master
-- that was demoted, and promoted again, may have missed what another one wrote meanwhile.
-- Kept in a field of its own: an earlier version keeps the process alone, as `run`. If both wrote the
-- same field, each would take the other's note for a loss, and neither would ever grant anything.
local function server_mark()
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  return (run or '') .. ':' .. (history or '')
end
