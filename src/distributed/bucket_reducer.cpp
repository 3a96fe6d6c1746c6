#include "distributed/bucket_reducer.h"

#include "distributed/backend.h"
#include "distributed/devices/device_bucket_reducer.h"
#include "distributed/devices/hosted_bucket_reducer.h"
#include "distributed/devices/staged_backend.h"
#include "distributed/devices/staged_bucket_reducer.h"
#include "distributed/local_bucket_reducer.h"
#include "distributed/process_state.h"
#include "distributed/slice_bucket_reducer.h"
#include "distributed/translate.h"
#include "distributed/work_bucket_reducer.h"

namespace paceline::distributed {

bool supports_in_place(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device,
                       bool several_leaves) {
  if (group->getSize() == 1) return false;
  const auto backend =
      translate("DistributedDataParallel", [&] { return group->getBackend(device); });
  const auto* const ours = dynamic_cast<ExtendedBackend*>(backend.get());
  return ours != nullptr && ours->reduces_in_place(several_leaves);
}

std::unique_ptr<BucketReducer> make_bucket_reducer(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const BucketReducer::Options& options) {
  check_not_forked("DistributedDataParallel");
  const c10::DeviceType device = accelerator_of(options.buckets).type();
  const bool is_alone = group->getSize() == 1;
  if (is_alone && (!options.leaves || options.leaves->one_each())) {
    return std::make_unique<LocalBucketReducer>(ProcessGroup(group), options);
  }
  // The order of the sum is the same for all backends only on the CPU.
  if (device != c10::DeviceType::CPU && options.leaves) {
    return std::make_unique<StagedBucketReducer>(group, options);
  }
  if (is_alone) return std::make_unique<SliceBucketReducer>(ProcessGroup(group), nullptr, options);
  auto backend = translate("DistributedDataParallel", [&] { return group->getBackend(device); });
  if (device != c10::DeviceType::CPU) {
    if (dynamic_cast<StagedBackend*>(backend.get()) != nullptr) {
      return std::make_unique<StagedBucketReducer>(group, options);
    }
    return std::make_unique<DeviceBucketReducer>(group, device, options);
  }
  if (auto* const ours = dynamic_cast<ExtendedBackend*>(backend.get())) {
    if (auto reducer = ours->make_bucket_reducer(options)) return reducer;
  }
  if (options.leaves) {
    return std::make_unique<SliceBucketReducer>(ProcessGroup(group), std::move(backend), options);
  }
  return std::make_unique<WorkBucketReducer>(ProcessGroup(group), std::move(backend), options);
}

}  // namespace paceline::distributed
