"""Names that the problems are about: systems of four categories, each within the one before.

Every item's name has two words or more and no two are the same, so an item tells its category. None holds "as", a
number or a sign, which the texts need for themselves. The first system has the categories of kaminocode/iGSM (School,
Classroom, Backpack, Stationery, ten items each); the items are our own words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Category:
    """A level of a system: what its items are called together, and their names."""

    name: str
    items: tuple[str, ...]


def _category(name: str, items: str) -> Category:
    return Category(name, tuple(item.strip() for item in items.split(",")))


SYSTEMS: tuple[tuple[Category, ...], ...] = (
    (
        _category(
            "School",
            "Maple Street High, North Valley High, Stone Bridge High, Silver Lake High, Cedar Hill Elementary, "
            "Willow Creek Elementary, Harbor View Elementary, Red Rock Middle, Clear Water Middle, Blue Ridge Academy",
        ),
        _category(
            "Classroom",
            "Music Room, Drama Room, Pottery Room, Chess Room, Reading Corner, Physics Lab, Botany Lab, "
            "Robot Workshop, Wood Workshop, Map Hall",
        ),
        _category(
            "Backpack",
            "Canvas Satchel, Leather Satchel, Trail Pack, Summit Pack, Rolling Pack, Sling Bag, Duffel Bag, Book Bag, "
            "Striped Rucksack, Rain Rucksack",
        ),
        _category(
            "Stationery",
            "Fountain Pen, Gel Pen, Wax Crayon, Drawing Pencil, Pocket Notebook, Graph Notebook, Paper Clip, "
            "Glue Stick, Brass Ruler, Rubber Stamp",
        ),
    ),
    (
        _category(
            "Farm",
            "Old Mill Farm, Sunny Slope Farm, Green Gate Farm, Long Meadow Farm, Crow Hollow Farm, Apple Lane Farm, "
            "Windy Knoll Farm, Two Rivers Farm, Fox Den Farm, Honey Brook Farm",
        ),
        _category(
            "Storehouse",
            "Hay Barn, Stone Barn, Round Barn, Root Cellar, Cold Cellar, Tall Silo, Tin Shed, Seed Shed, Drying Loft, "
            "Smoke House",
        ),
        _category(
            "Basket",
            "Wicker Crate, Pine Crate, Slatted Crate, Wire Hamper, Woven Hamper, Bushel Tub, Copper Tub, Burlap Sack, "
            "Linen Sack, Egg Tray",
        ),
        _category(
            "Produce",
            "Sweet Onion, Spring Onion, Butter Lettuce, Snap Pea, Purple Carrot, White Radish, Wax Bean, Fava Bean, "
            "Plum Tomato, Acorn Squash",
        ),
    ),
    (
        _category(
            "Library",
            "Elm Park Library, Grand Square Library, Castle Road Library, Station Library, Lighthouse Library, "
            "Market Library, University Library, Seaside Library, Hilltop Library, Orchard Library",
        ),
        _category(
            "Bookcase",
            "Oak Bookcase, Walnut Bookcase, Glass Cabinet, Iron Cabinet, Corner Shelf, Ladder Shelf, Window Shelf, "
            "Revolving Stand, Display Stand, Archive Drawer",
        ),
        _category(
            "Volume",
            "Travel Atlas, Star Atlas, Bird Guide, Fern Guide, Sea Chronicle, War Chronicle, Fairy Tale, Ghost Tale, "
            "Cook Book, Law Book",
        ),
        _category(
            "Marker",
            "Silk Ribbon, Velvet Ribbon, Pressed Leaf, Pressed Flower, Post Card, Index Card, Ticket Stub, "
            "Sticky Note, Margin Note, Bronze Tag",
        ),
    ),
    (
        _category(
            "Port",
            "Amber Cove, Dolphin Cove, Whale Bay, Coral Bay, Misty Haven, Golden Haven, Anchor Point, Gull Point, "
            "Twin Pier, Salt Pier",
        ),
        _category(
            "Vessel",
            "Fishing Trawler, Steam Trawler, River Barge, Coal Barge, Mail Packet, Racing Sloop, Pilot Sloop, "
            "Cargo Liner, Night Ferry, Car Ferry",
        ),
        _category(
            "Container",
            "Sea Chest, Tea Chest, Rum Cask, Oil Cask, Fish Barrel, Flour Barrel, Spice Jar, Honey Jar, Steel Locker, "
            "Mesh Locker",
        ),
        _category(
            "Gear",
            "Brass Compass, Pocket Compass, Signal Lamp, Storm Lamp, Mooring Rope, Tow Rope, Boat Hook, Crab Hook, "
            "Spy Glass, Hand Pump",
        ),
    ),
)
