// Kernel sources are compiled once for each instruction set, each time in a namespace of its own (the build defines
// PACELINE_LEVEL). They use no templates or inline functions from outside that namespace, standard library included:
// the linker keeps one copy of such a function, perhaps one that this machine cannot run.
#pragma once
#ifndef PACELINE_LEVEL
#error "PACELINE_LEVEL must name the instruction set that this file is compiled for"
#endif
