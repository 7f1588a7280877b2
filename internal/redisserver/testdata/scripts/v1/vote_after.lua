
end
local mark = redis.call('GET', KEYS[6])
local answer = operate()
local t = redis.call('TIME')
local clock = t[1] * 1000000 + t[2]
if not tonumber(mark) or tonumber(mark) > clock then
  mark = string.format('%.0f', clock)
  redis.call('SET', KEYS[6], mark)
end
return { mark, answer }
