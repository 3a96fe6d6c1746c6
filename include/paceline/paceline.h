#pragma once

// Everything Paceline offers. <torch/torch.h> comes first in programs that use it.

#include <paceline/collectives.h>
#include <paceline/comm_hooks.h>
#include <paceline/data_loader.h>
#include <paceline/datasets.h>
#include <paceline/ddp.h>
#include <paceline/distributed.h>
#include <paceline/error.h>
#include <paceline/for_each_tensor.h>
#include <paceline/join.h>
#include <paceline/log.h>
#include <paceline/progress.h>
#include <paceline/record.h>
#include <paceline/sampler.h>
#include <paceline/sync_batch_norm.h>
#include <paceline/tune_malloc.h>
#include <paceline/version.h>
