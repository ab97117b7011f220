//! Write-back: dirty data in address order to the backing device, one flush a batch, then the keys turn clean.

pub mod pass;
pub mod trouble;
