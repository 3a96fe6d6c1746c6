#pragma once

#include <cstddef>
#include <vector>

namespace paceline::parameter_server {

// The server of each parameter; `bytes`: their sizes. Each server gets about as many bytes; the
// largest parameters are placed first. The same on every rank.
std::vector<int> assign_to_servers(const std::vector<std::size_t>& bytes, int servers);

}  // namespace paceline::parameter_server
