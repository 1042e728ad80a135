-- Identifies a server, to detect that its data may be incomplete: the id of this process, and the id
-- of its replication history. Both change with a restart. Every promotion starts a new history: a
-- master that was demoted and promoted again may have missed writes of the master in between.
-- Stored in a field of its own, because an earlier version stores the process id alone, as `run`. If
-- both versions wrote one field, each would take the value of the other for a loss, and neither would
-- ever grant.
local function server_mark()
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local history = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  return (run or '') .. ':' .. (history or '')
end
