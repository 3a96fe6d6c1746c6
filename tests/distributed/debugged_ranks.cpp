// Ranks that PyTorch's debug frontend looks at: all wait in an all_reduce for rank 0, which prints
// a line and then waits for the end of its standard input.
#include <torch/torch.h>

#include <cstdio>
#include <iostream>

#include <paceline/paceline.h>

int main() {
  return paceline::record([] {
    const auto world = paceline::init_process_group();
    const auto server = paceline::start_debug_server();
    paceline::barrier();
    if (paceline::get_rank() == 0) {
      std::cout << "served" << std::endl;
      while (std::cin.get() != EOF) {
      }
    }
    paceline::all_reduce(torch::ones({3}));
  });
}
