#pragma once

namespace paceline::distributed {

// Throws UsageError in a process that was forked, without exec, in a state in which LibTorch cannot
// work: CUDA was initialized, or LibTorch's intra-op threads ran for the thread that forked.
void check_forked_child();

}  // namespace paceline::distributed
