#include <paceline/grad_scaler.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "optim/state_archive.h"

namespace paceline {
namespace {

void check_options(const GradScalerOptions& options) {
  const auto check = [](bool valid, const char* name, double value, const char* allowed) {
    if (!valid) throw UsageError(fmt::format("GradScaler: {} of {}: {}", name, value, allowed));
  };
  const auto scale = static_cast<float>(options.init_scale);
  check(scale > 0 && std::isfinite(scale), "init_scale", options.init_scale,
        "it must be positive and finite, as a float");
  check(options.growth_factor > 1 && std::isfinite(options.growth_factor), "growth_factor",
        options.growth_factor, "it must exceed 1, and be finite");
  check(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor",
        options.backoff_factor, "it must be between 0 and 1");
  check(options.growth_interval >= 1, "growth_interval",
        static_cast<double>(options.growth_interval), "it must be at least 1");
}

}  // namespace

class GradScaler::Impl {
 public:
  explicit Impl(const GradScalerOptions& options) : options_(options) { check_options(options); }

  at::Tensor scale(const at::Tensor& loss) {
    if (!options_.enabled) return loss;
    if (!scale_.defined()) {
      scale_ = at::full({}, options_.init_scale, at::device(loss.device()).dtype(at::kFloat));
      growth_tracker_ = at::full({}, growth_, scale_.options().dtype(at::kInt));
    }
    return loss * scale_;
  }

  void unscale(torch::optim::Optimizer& optimizer) {
    if (!options_.enabled) return;
    if (!scale_.defined()) throw UsageError("GradScaler: call scale() before the first step");
    if (optimizers_.count(&optimizer) > 0) {
      throw UsageError(
          "GradScaler: these gradients are unscaled already: call unscale_() and step() once for "
          "each optimizer, and then update()");
    }
    std::vector<at::Tensor> gradients = gradients_of(optimizer);
    at::Tensor found_inf;
    if (!gradients.empty()) {
      found_inf = at::zeros({}, scale_.options());
      const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
      at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse);
    }
    optimizers_[&optimizer].found_inf = std::move(found_inf);
  }

  bool step(torch::optim::Optimizer& optimizer) {
    if (!options_.enabled) {
      optimizer.step();
      return true;
    }
    if (optimizers_.count(&optimizer) == 0) unscale(optimizer);
    Unscaled& unscaled = optimizers_[&optimizer];
    if (!unscaled.found_inf.defined()) {
      optimizers_.erase(&optimizer);
      throw UsageError(
          "GradScaler: step() of an optimizer whose parameters have no gradient: run backward() on "
          "what scale() returned before, and pass the optimizer of the model that it trains");
    }
    if (std::exchange(unscaled.stepped, true)) {
      throw UsageError("GradScaler: step() was called twice for one optimizer without update()");
    }
    if (unscaled.found_inf.item<float>() != 0) return false;
    optimizer.step();
    return true;
  }

  void update() {
    if (!options_.enabled) return;
    std::vector<at::Tensor> found;
    for (const auto& [optimizer, unscaled] : optimizers_) {
      if (unscaled.found_inf.defined()) found.push_back(unscaled.found_inf);
    }
    if (found.empty()) throw UsageError("GradScaler: update() without a step() before");
    const at::Tensor found_inf = at::stack(found).sum();
    at::_amp_update_scale_(scale_, growth_tracker_, found_inf, options_.growth_factor,
                           options_.backoff_factor, options_.growth_interval);
    optimizers_.clear();
  }

  double get_scale() const {
    if (!options_.enabled) return 1;
    return scale_.defined() ? scale_.item<double>() : options_.init_scale;
  }

  at::IValue state_dict() const {
    optim::StateArchive state("GradScaler");
    if (!options_.enabled) return state.dict();
    double scale = get_scale();
    std::int64_t tracker =
        growth_tracker_.defined() ? growth_tracker_.item<std::int64_t>() : growth_;
    GradScalerOptions options = options_;
    archive(state, scale, options, tracker);
    return state.dict();
  }

  void load_state_dict(const at::IValue& value) {
    if (!options_.enabled) return;
    optim::StateArchive state("GradScaler", value);
    GradScalerOptions options = options_;
    std::int64_t tracker = 0;
    archive(state, options.init_scale, options, tracker);
    check_options(options);
    if (tracker < 0 || !std::in_range<std::int32_t>(tracker)) {
      state.reject(fmt::format("'_growth_tracker' is {}", tracker));
    }
    options_ = options;
    growth_ = tracker;
    scale_.reset();  // made again for the next loss
    growth_tracker_.reset();
    optimizers_.clear();
  }

 private:
  struct Unscaled {
    at::Tensor found_inf{};  // not 0 if a gradient was not finite
    bool stepped = false;
  };

  static void archive(optim::StateArchive& state, double& scale, GradScalerOptions& options,
                      std::int64_t& tracker) {
    state("scale", scale);
    state("growth_factor", options.growth_factor);
    state("backoff_factor", options.backoff_factor);
    state("growth_interval", options.growth_interval);
    state("_growth_tracker", tracker);
  }

  std::vector<at::Tensor> gradients_of(torch::optim::Optimizer& optimizer) const {
    std::vector<at::Tensor> gradients;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const at::Tensor& gradient = parameter.grad();
        if (!gradient.defined()) continue;
        if (gradient.scalar_type() == at::kHalf) {
          throw UsageError(
              "GradScaler: a gradient is in float16, where unscaled it may become 0: keep "
              "parameters in float32, and let autocast choose the types");
        }
        if (gradient.device() != scale_.device()) {
          throw UsageError(fmt::format("GradScaler: a gradient is on {} and the loss on {}",
                                       gradient.device().str(), scale_.device().str()));
        }
        gradients.push_back(gradient.is_sparse() ? gradient._values() : gradient);
      }
    }
    return gradients;
  }

  GradScalerOptions options_;
  std::int64_t growth_ = 0;    // the first value of growth_tracker_
  at::Tensor scale_;           // on the device of the losses
  at::Tensor growth_tracker_;  // steps since the last change
  std::map<const torch::optim::Optimizer*, Unscaled> optimizers_;
};

GradScaler::GradScaler(const GradScalerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&& other) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&& other) noexcept = default;

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  return impl_->scale(loss);
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  impl_->unscale(optimizer);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  return impl_->step(optimizer);
}

void GradScaler::update() {
  const at::NoGradGuard no_grad;
  impl_->update();
}

double GradScaler::get_scale() const {
  return impl_->get_scale();
}

at::IValue GradScaler::state_dict() const {
  return impl_->state_dict();
}

void GradScaler::load_state_dict(const at::IValue& state) {
  impl_->load_state_dict(state);
}

}  // namespace paceline
