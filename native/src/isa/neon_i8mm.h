// NEON with the dot products of mixed signs of ARMv8.6 (i8mm), whose bits are those of neon.h.
#pragma once
#include "neon.h"
