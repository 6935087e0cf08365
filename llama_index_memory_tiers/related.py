"""Everyday words that answer to others: who asks about pets wants to hear of the cat."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from llama_index_memory_tiers.text import analyse

MOST_GROUPS = 16
"""Of one question; more would be a list of words, not a question."""

# What is asked for | what an answer would say. From everyday vocabulary, by hand; one direction, as a question is
# general and an answer particular. Chinese words have two characters, as `analyse` pairs them.
_WORDS = """
child children kid | son daughter boy girl baby toddler
parent | mother father mom mum dad
sibling | brother sister twin
family relative | mother father mom mum dad son daughter brother sister grandmother grandfather grandma grandpa \
    aunt uncle cousin nephew niece
spouse partner | husband wife fiance girlfriend boyfriend
marry marriage wedding | husband wife bride groom engaged anniversary
relationship | married divorced single dating girlfriend boyfriend husband wife breakup
pet animal | dog puppy cat kitten rabbit hamster bird parrot fish turtle horse
dog | puppy
cat | kitten
job work career profession occupation | company office boss manager colleague hired promoted engineer teacher nurse \
    doctor lawyer accountant designer salary
study education school | college university class course exam degree student teacher professor homework graduate
sport exercise | gym run jog swim football soccer basketball tennis baseball hockey volleyball cricket yoga pilates \
    cycle hike climb ski box karate judo taekwondo
martial | karate judo taekwondo boxing kickboxing kungfu aikido
music instrument | guitar piano violin cello drum flute trumpet sing song band concert album
art | paint draw sketch sculpture photograph ceramics pottery gallery
hobby interest activity | read paint draw photograph cook bake garden hike camp swim run dance knit fish game
food meal dish eat | breakfast lunch dinner restaurant recipe cook bake pizza pasta rice soup salad steak chicken fish
dessert sweet | cake cookie pie chocolate candy
drink beverage | coffee tea wine beer juice water
diet | vegan vegetarian keto calorie
allergy | peanut nut dairy lactose gluten shellfish pollen
health illness sick disease medical | doctor hospital clinic surgery diagnosed flu fever pain medicine medication
injury hurt | broke sprain fracture ankle wrist knee surgery
travel trip vacation holiday | flight fly airport hotel beach tour abroad cruise passport
country abroad | america canada mexico brazil england france germany italy spain portugal greece sweden norway \
    japan china korea india thailand australia
europe european | england ireland france germany italy spain portugal greece sweden norway denmark netherlands \
    switzerland austria poland
asia asian | japan china korea india thailand vietnam indonesia malaysia singapore
state | california texas florida colorado arizona oregon washington nevada michigan ohio georgia
city | london paris berlin rome madrid tokyo beijing shanghai boston chicago seattle
outdoor nature | hike camp mountain lake river forest beach park trail
weather | rain snow sun storm wind cold hot
season | spring summer autumn fall winter
movie film show | watch cinema theater series episode netflix
book literature | read novel author chapter library
game | play chess card board video console
vehicle transport | car bike bicycle motorcycle truck van bus train
home house live | apartment flat room rent kitchen neighborhood
move relocate | apartment house city home
buy purchase shop | bought ordered paid store price
gift present | birthday gave wrapped
clothes clothing wear outfit | shirt dress shoe jacket coat hat jeans
jewelry | ring necklace bracelet earring
charity volunteer | donate fundraiser community shelter
color | red blue green yellow purple orange pink black white
feel feeling emotion mood | happy sad angry excited nervous anxious proud scared grateful
stress relax | calm meditate yoga therapy walk sleep
money finance | pay paid cost salary loan saving budget rent price
language | english spanish french german italian chinese japanese
religion faith | church god pray bible temple mosque
military | army navy soldier veteran
technology device computer | phone laptop tablet camera software app
event celebration | party concert festival wedding conference parade fair
plan goal dream | hope want future someday
age old | birthday turned born
name | called named
weekend | saturday sunday
孩子 子女 | 儿子 女儿 宝宝
父母 爸妈 | 爸爸 妈妈 父亲 母亲
兄弟 姐妹 | 哥哥 弟弟 姐姐 妹妹
家人 亲戚 亲人 | 爸爸 妈妈 儿子 女儿 哥哥 弟弟 姐姐 妹妹 爷爷 奶奶 外婆 外公
爱人 伴侣 配偶 | 妻子 丈夫 老婆 老公 男友 女友
结婚 婚礼 | 妻子 丈夫 新娘 新郎
宠物 动物 | 小狗 小猫 兔子 金鱼 鹦鹉
工作 职业 | 公司 老板 同事 经理 升职 工资 入职 辞职
学习 学校 | 大学 老师 考试 课程 同学 毕业
运动 锻炼 | 跑步 游泳 健身 篮球 足球 网球 爬山 骑车 瑜伽
音乐 乐器 | 钢琴 吉他 提琴 唱歌 歌曲 乐队
爱好 兴趣 | 看书 画画 摄影 做饭 钓鱼 爬山 下棋 跳舞
食物 饮食 | 早饭 午饭 晚饭 餐厅 火锅 饺子 面条 米饭
饮料 | 咖啡 喝茶 果汁 啤酒
过敏 | 花生 牛奶 海鲜 花粉
健康 生病 身体 | 医院 医生 手术 感冒 发烧 吃药 体检
旅行 旅游 度假 | 机票 酒店 飞机 高铁 景点
交通 车子 | 汽车 地铁 公交 火车 单车
电影 | 影院 上映 导演
书籍 | 小说 作者 看书
房子 住处 | 公寓 租房 搬家 装修 小区
购物 | 超市 商店 下单
礼物 | 生日 送给
天气 | 下雨 下雪 刮风 晴天
颜色 | 红色 蓝色 绿色 黄色 黑色 白色
心情 情绪 | 开心 难过 紧张 生气 焦虑
"""


def related_terms(terms: Iterable[str]) -> list[tuple[str, ...]]:
    """What an answer may say in place of a question's own words.

    Args:
        terms: Of the question, as `analyse` gives them.

    Returns:
        For each term that has some, the terms of related words that are not in the question; 16 groups at most.
    """
    asked = dict.fromkeys(terms)
    known = _related()
    groups = [tuple(term for term in known[word] if term not in asked) for word in asked if word in known]
    return [group for group in dict.fromkeys(groups) if group][:MOST_GROUPS]


@cache
def _related() -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for line in _WORDS.strip().splitlines():
        asked, said = line.split("|")
        answers = dict.fromkeys(term for word in said.split() for term in _terms(word))
        for word in asked.split():
            for term in _terms(word):
                found.setdefault(term, {}).update(answers)
    return {word: tuple(answers) for word, answers in found.items()}


def _terms(word: str) -> list[str]:
    return list(analyse(word)) if word.isascii() else [word]
