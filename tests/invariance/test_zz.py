import pytest
from .people import differing
from .whole_layers import *
from .over_pages import *
from .rowwise import *
D={"delta T":(delta_verification,[(2,3),(2,5)],"T",False),"fold T":(delta_folding,[(2,2),(2,3)],"T",False),
"att T":(attention,[(2,3),(2,6)],"T",True),"att B":(attention,[(1,4),(3,4)],"B",True),
"mla B":(latent_attention,[(1,4),(2,4)],"B",True),"qkv B":(attention_from_projection,[(1,4),(2,4)],"B",True),"qkv T":(attention_from_projection,[(2,3),(2,5)],"T",True),
"chain T":(whole_layer,[(1,3),(1,5)],"T",True),"fp8 1 split":(partial(attention,stored=FP8,splits=1),[(3,4)],"",True),"int8 1 split":(partial(attention,stored=INT8,splits=1),[(3,4)],"",True),
}
@pytest.mark.parametrize("n",D)
def test_d(n):
    m,s,f,mv=D[n]
    assert not differing(m(False),s,free=f,moves=mv,turns=3)
