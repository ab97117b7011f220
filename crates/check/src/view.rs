//! The content of the volumes of a checked set, read offline from the images: which range comes
//! from the cache, which from the backing device, and which is zero.

use crate::buckets::Buckets;
use crate::content::{self, ReplayedKeys};
use crate::findings::Findings;
use crate::image::ReadAt;
use crate::tree::{NodeRef, TreeWalk};
use crate::volumes::Volume;
use bcached_format::{Geometry, Inode, Position, SECTOR_BYTES};
use serde::Serialize;
use std::io;

/// Where a range's data is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataSource {
    /// On the cache device, from this sector on.
    Cache {
        /// First sector.
        sector: u64,
        /// Whether the backing device may hold other data.
        dirty: bool,
    },
    /// On the backing device, at the same sectors.
    Backing,
    /// Nowhere: it reads as zero.
    Zero,
    /// Unknown: the node that maps the range is damaged.
    Lost,
}

/// A range with one source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct SourceRange {
    /// First sector in the volume's key space.
    pub start: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// Where the range's data is.
    pub source: DataSource,
}

/// The content of a checked set.
pub struct SetView<'a> {
    cache: &'a dyn ReadAt,
    backings: &'a [&'a dyn ReadAt],
    geometry: Geometry,
    tree: TreeWalk,
    replay: ReplayedKeys,
    buckets: Buckets,
    volumes: Vec<Volume>,
}

impl<'a> SetView<'a> {
    pub(crate) const fn new(
        cache: &'a dyn ReadAt,
        backings: &'a [&'a dyn ReadAt],
        geometry: Geometry,
        tree: TreeWalk,
        replay: ReplayedKeys,
        buckets: Buckets,
        volumes: Vec<Volume>,
    ) -> Self {
        Self { cache, backings, geometry, tree, replay, buckets, volumes }
    }

    /// Returns the volumes, as in the report.
    #[must_use]
    pub fn volumes(&self) -> &[Volume] {
        &self.volumes
    }

    /// Returns where the data of `[start, start + sectors)` of a volume's key space is, in order
    /// and without gaps.
    ///
    /// For a volume with a backing device, the key space counts that device's sectors from its
    /// start, including its data offset. Cached data of a device that was run without its cache is
    /// not used.
    #[must_use]
    pub fn content(&self, inode: Inode, start: u64, sectors: u64) -> Vec<SourceRange> {
        let end = start.saturating_add(sectors);
        let volume = self.volumes.iter().find(|volume| volume.inode == inode.0);
        let hole = if volume.is_some_and(|volume| volume.flash_only) {
            DataSource::Zero
        } else {
            DataSource::Backing
        };
        let mut pieces = RangeList { list: Vec::new(), at: start, hole };
        if volume.is_some_and(|volume| volume.state == Some("stale")) {
            pieces.fill(end);
            return pieces.list;
        }
        for node in self.nodes(inode, start, end) {
            if self.tree.lost.contains(node) {
                pieces.lost(node, inode, end);
                continue;
            }
            let mut findings = Findings::new(0);
            let content = content::of_leaf(self.cache, &self.geometry, node, &self.replay, &mut findings);
            for key in content.of_volume(inode, start, end) {
                let Some(pointer) = key.pointers.as_slice().first().filter(|_| self.buckets.is_live(&key))
                else {
                    continue;
                };
                pieces.fill(key.start());
                pieces.push(key.end, DataSource::Cache { sector: pointer.sector(), dirty: key.dirty });
            }
        }
        pieces.fill(end);
        pieces.list
    }

    /// Returns the leaves, and the nodes that cannot be read, which a range touches, in order.
    fn nodes(&self, inode: Inode, start: u64, end: u64) -> Vec<&NodeRef> {
        let (low, high) = (Position::new(inode, start), Position::new(inode, end));
        let touches = |node: &&NodeRef| node.high > low && node.low < high;
        // The leaves are in order, so those that end too early are skipped at once.
        let first = self.tree.leaves.partition_point(|leaf| leaf.high <= low);
        let leaves = self.tree.leaves[first..].iter().take_while(|leaf| leaf.low < high);
        let mut nodes: Vec<&NodeRef> = leaves.chain(self.tree.lost.iter().filter(touches)).collect();
        nodes.sort_by_key(|node| node.low);
        nodes
    }

    /// Reads a volume's key space from `start` on into `buffer`, which is whole sectors, as the
    /// volume itself would return it.
    ///
    /// # Errors
    /// If a device cannot be read, the backing device was not given, or a node of the tree is
    /// damaged there.
    pub fn read(&self, inode: Inode, start: u64, buffer: &mut [u8]) -> io::Result<()> {
        let sectors = buffer.len() as u64 / SECTOR_BYTES;
        let mut rest = buffer;
        for piece in self.content(inode, start, sectors) {
            let bytes = usize::try_from(piece.sectors * SECTOR_BYTES).map_err(io::Error::other)?;
            let (part, next) = rest.split_at_mut(bytes);
            match piece.source {
                DataSource::Cache { sector, .. } => self.cache.read_at(sector, part)?,
                DataSource::Backing => self.backing_of(inode)?.read_at(piece.start, part)?,
                DataSource::Zero => part.fill(0),
                DataSource::Lost => return Err(io::Error::other("a damaged node covers this range")),
            }
            rest = next;
        }
        Ok(())
    }

    fn backing_of(&self, inode: Inode) -> io::Result<&dyn ReadAt> {
        let volume = self.volumes.iter().find(|volume| volume.inode == inode.0);
        let index = volume.and_then(|volume| volume.backing);
        let image = index.and_then(|index| self.backings.get(index));
        image.copied().ok_or_else(|| io::Error::other("the volume's backing device was not given"))
    }
}

/// A list of pieces under construction. Gaps between pieces are holes.
struct RangeList {
    list: Vec<SourceRange>,
    at: u64,
    hole: DataSource,
}

impl RangeList {
    fn fill(&mut self, end: u64) {
        self.push(end, self.hole);
    }

    fn push(&mut self, end: u64, source: DataSource) {
        if end > self.at {
            self.list.push(SourceRange { start: self.at, sectors: end - self.at, source });
            self.at = end;
        }
    }

    fn lost(&mut self, node: &NodeRef, inode: Inode, end: u64) {
        if node.low.inode == inode {
            self.fill(node.low.offset);
        }
        let high = if node.high.inode == inode { node.high.offset } else { u64::MAX };
        self.push(high.min(end), DataSource::Lost);
    }
}
